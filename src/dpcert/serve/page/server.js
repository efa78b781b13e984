// The classifier behind the page's own server.

import { fromNested, toNested } from "./image.js";

export const place = "on the server that sent this page: your image is sent there and not stored";

let facts, key = "";

// Use an API key from now on; it is kept in memory only.
export function useKey(value) {
  key = value;
}

async function ask(path, image, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const body = image && JSON.stringify({ image: toNested(image, facts.input_shape) });
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
  if (answer.ok) return answer;
  const problem = new Error(await answer.json().then((said) => said.error, () => `the server answered ${answer.status}`));
  problem.status = answer.status;
  throw problem;
}

export async function open() {
  facts = await (await ask("model")).json();
  return facts;
}

// Read a stream of lines, each a JSON object: counts while the votes arrive, then the answer.
export async function certify(image, { n }, tell, signal) {
  const answer = await ask(`votes?n=${n}`, image, signal);
  let final;
  for await (const line of lines(answer.body)) {
    if (line.error) throw new Error(line.error);
    if ("cast" in line) tell(line.cast, line.votes); else final = line;
  }
  if (!final) throw new Error("the server ended before the last vote; try again");
  if (final.model_sha256 !== facts.model_sha256) throw new Error("the server now has another model; reload the page");
  const selected = final.abstained ? null : final.class;
  return { ...final, selected, count: selected === null ? null : final.votes[selected] };
}

async function* lines(body) {
  const reader = body.getReader(), decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    const parts = (rest + (done ? decoder.decode() : decoder.decode(value, { stream: true }))).split("\n");
    rest = done ? "" : parts.pop();
    for (const part of parts) if (part.trim()) yield JSON.parse(part);
    if (done) return;
  }
}

export async function noisy(image, count) {
  const { images, classes } = await (await ask(`noisy?count=${count}`, image)).json();
  return images.map((url, i) => ({ url, class: classes[i] }));
}

export async function attack(image, label, strength, signal) {
  const answer = await ask(`attack?target=smoothed&label=${label}&strength=${strength}`, image, signal);
  return fromNested((await answer.json()).image);
}

export async function gallery() {
  if (!facts.gallery) return [];
  const count = 24, { total } = await (await ask("gallery?start=0&count=1")).json();
  const { items } = await (await ask(`gallery?start=0&count=${Math.min(count, total)}`)).json();
  return items.map(({ index, label, png }) => ({
    index, label, url: png, load: async () => fromNested((await (await ask(`gallery/${index}`)).json()).image),
  }));
}
