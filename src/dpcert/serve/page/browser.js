// The classifier in this browser: the model is a file next to the page, and no image leaves the computer.

import { fromNested } from "./image.js";

export const place = "in this browser: your image is not sent anywhere";

const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let last = 0;

worker.onmessage = ({ data: { id, news, done, error } }) => {
  const { tell, resolve, reject } = waiting.get(id);
  if (news) return tell(...news);
  waiting.delete(id);
  if (error === undefined) resolve(done); else reject(new Error(error));
};
worker.onerror = (event) => {
  for (const { reject } of waiting.values()) reject(new Error(event.message ?? "the browser cannot start the model"));
};

function ask(job, values = {}, tell = () => {}, signal = undefined) {
  const id = ++last;
  return new Promise((resolve, reject) => {
    waiting.set(id, { tell, resolve, reject });
    worker.postMessage({ id, job, ...values });
    signal?.addEventListener("abort", () => {
      worker.postMessage({ id, job: "stop" });
      waiting.set(id, { tell: () => {}, resolve: () => {}, reject: () => {} });
      reject(new DOMException("stopped", "AbortError"));
    });
  });
}

async function file(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name} is missing (${answer.status}); upload the whole folder of the demo`);
  return answer;
}

let facts;

export async function open() {
  const [described, model] = await Promise.all([file("model.json"), file("model.onnx")]);
  facts = await described.json();
  await ask("open", { facts, model: await model.arrayBuffer() });
  return facts;
}

export async function certify(image, { n }, tell, signal) {
  const request = { n0: facts.n0, n, alpha: facts.alpha, sigma: facts.sigma };
  const counted = (phase, cast, votes) => phase === "estimation" && tell(cast, votes);
  return ask("certify", { image, request }, counted, signal);
}

export function noisy(image, count) {
  return ask("noisy", { image, count });
}

export async function attack(image, label, strength, signal) {
  return ask("attack", { image, label, strength }, undefined, signal);
}

export async function gallery() {
  const items = await (await file("gallery.json")).json();
  return items.map(({ index, label, image }) => ({ index, label, load: async () => fromNested(image) }));
}

// For the tests.
export const logits = (rows, count) => ask("logits", { rows, count });
