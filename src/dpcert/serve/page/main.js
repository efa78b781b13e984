// The page: choose an image, ask, show what came back. Everything it says about the model comes from `engine.open()`.

import { Attack } from "./attack.js";
import { Ball } from "./ball.js";
import { Bars } from "./bars.js";
import { normalized } from "./digit.js";
import { fromFile, show } from "./image.js";
import { Pad } from "./pad.js";
import * as words from "./words.js";

const $ = (id) => document.getElementById(id);
const COPIES = 8; // noisy copies that are shown
const FEWER_VOTES = 1000;
const DRAWN = new Set(["mnist"]); // prepared as the makers of the data set did
const LARGEST_DRAWING = 64;

const state = { image: null, result: null, abort: null };
let engine, facts, pad, bars, ball, attack;

async function start() {
  const votes = document.querySelector("meta[name=dpcert-votes]").content;
  engine = await import(votes === "browser" ? "./browser.js" : "./server.js");
  try {
    facts = await engine.open();
  } catch (error) {
    $("lead").textContent = "";
    if (error.status !== 401 || $("key").value) complain(error);
    if (error.status !== 401) return;
    $("key-form").hidden = false;
    return $("key").focus();
  }
  describe();
  prepare();
  $("main").hidden = false;
  await fillGallery().catch(complain);
}

function describe() {
  const drawn = facts.input_shape[0] === 1 && DRAWN.has(facts.dataset);
  $("title").textContent = drawn ? "Draw a digit. Get an answer with a certificate." : "Pick an image. Get an answer with a certificate.";
  $("run-name").textContent = `· ${facts.dataset} · ${facts.method}`;
  $("lead").textContent = words.lead(facts);
  define($("promised"), words.promised(facts));
  define($("not-promised"), words.notPromised(facts));
  $("place").textContent = `Votes are computed ${engine.place}.`;
  $("noise-words").textContent = `The model never votes on your image itself, only on copies with Gaussian noise (σ = ${facts.sigma}). Below each copy is its vote.`;
  $("attack-words").textContent = "Move the image in the direction that hurts the answer most. Inside the ball the certificate holds; beyond it, it ends.";
  $("statement").replaceChildren(...statement());
}

function statement() {
  const { privacy } = facts, said = [privacy.statement ?? "", ...(privacy.sentences ?? [])].filter(Boolean);
  const settings = `σ = ${facts.sigma}, n₀ = ${words.whole(facts.n0)}, n = ${words.whole(facts.n)}, α = ${facts.alpha}, ${facts.dtype}. Model SHA-256: `;
  const paragraphs = [...said, settings].map((text) => Object.assign(document.createElement("p"), { className: "quiet", textContent: text }));
  paragraphs.at(-1).append(Object.assign(document.createElement("span"), { className: "hash", textContent: facts.model_sha256 }));
  return paragraphs;
}

function define(list, rows) {
  list.replaceChildren(...rows.flatMap(([term, text]) => [
    Object.assign(document.createElement("dt"), { textContent: term }),
    Object.assign(document.createElement("dd"), { textContent: text }),
  ]));
}

function prepare() {
  const names = Array.from({ length: facts.classes }, (_, label) => words.className(facts, label));
  bars = new Bars($("bars"), names);
  ball = new Ball($("ball"));
  attack = new Attack(engine, facts, { task, votes: () => Number($("count").value) });
  const counts = [...new Set([Math.min(FEWER_VOTES, facts.n), facts.n])];
  $("count").replaceChildren(...counts.map((n) => new Option(words.whole(n), n, n === facts.n, n === facts.n)));
  const [channels, height, width] = facts.input_shape;
  if (channels === 1 && height === width && height <= LARGEST_DRAWING) preparePad(height);
  listen();
}

function preparePad(size) {
  const changed = (empty) => {
    $("ask").disabled = empty;
    $("undo").disabled = $("clear").disabled = empty;
  };
  pad = new Pad($("pad"), size, DRAWN.has(facts.dataset), { changed, ask: () => !pad.empty && task(ask), say });
  useDrawing(DRAWN.has(facts.dataset));
  changed(true);
}

// Show the drawing area, or the chosen image in its place.
function useDrawing(drawing) {
  state.image = drawing ? null : state.image;
  if (drawing) $("chosen-words").textContent = "";
  $("drawing").hidden = $("undo").hidden = $("clear").hidden = !drawing;
  $("chosen").hidden = drawing || !state.image;
  $("redraw").hidden = drawing || !pad;
}

function listen() {
  $("ask").addEventListener("click", () => task(ask));
  $("stop").addEventListener("click", () => state.abort?.abort());
  $("undo").addEventListener("click", () => pad.undo());
  $("clear").addEventListener("click", () => pad.clear());
  $("redraw").addEventListener("click", () => (useDrawing(true), ($("ask").disabled = pad.empty), $("pad").focus()));
  $("again").addEventListener("click", () => task(showCopies));
  $("file").addEventListener("change", ({ target }) => target.files[0] && open(target.files[0]));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => (event.preventDefault(), event.dataTransfer.files[0] && open(event.dataTransfer.files[0])));
  addEventListener("paste", ({ clipboardData }) => clipboardData.files[0] && open(clipboardData.files[0]));
}

function open(file) {
  return task(async (signal) => {
    const { image, exact } = await fromFile(file, facts.input_shape);
    choose(DRAWN.has(facts.dataset) && !exact ? asDigit(image) : image, file.name);
    await ask(signal);
  });
}

// A photo of a digit on light paper: dark ink becomes light, as in the training images.
function asDigit(image) {
  const [, height, width] = facts.input_shape, corners = [0, width - 1, (height - 1) * width, height * width - 1];
  const paper = corners.reduce((sum, i) => sum + image[i], 0) / corners.length;
  const ink = paper > 0.5 ? image.map((value) => 1 - value) : image;
  const least = Math.min(...ink), most = Math.max(...ink);
  const clean = ink.map((value) => Math.max(0, (value - least) / Math.max(1e-6, most - least) - 0.25) / 0.75);
  return height === width ? normalized(clean, width, width) : clean;
}

function choose(image, about = "") {
  state.image = image;
  useDrawing(false);
  $("chosen-words").textContent = about;
  show($("chosen"), image, facts.input_shape);
  $("ask").disabled = false;
}

async function fillGallery() {
  const items = await engine.gallery();
  $("gallery").hidden = items.length === 0;
  $("thumbs").replaceChildren(...items.map(thumb));
  if (pad && !items.length) useDrawing(true);
  if (!DRAWN.has(facts.dataset) && items.length) choose(await items[0].load(), `Test image ${items[0].index}, labeled ${words.className(facts, items[0].label)}`);
}

function thumb({ index, label, url, load }) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "thumb" });
  const about = `Test image ${index}, labeled ${words.className(facts, label)}`;
  button.setAttribute("aria-label", about);
  const picture = document.createElement(url ? "img" : "canvas");
  if (url) Object.assign(picture, { src: url, alt: "" });
  else load().then((image) => show(picture, image, facts.input_shape));
  button.append(picture);
  button.addEventListener("click", () => task(async (signal) => (choose(await load(), about), await ask(signal))));
  return button;
}

// Run one request at a time: a new one stops the one before. Errors are shown, never thrown away.
async function task(work) {
  state.abort?.abort();
  const abort = (state.abort = new AbortController());
  $("problem").hidden = true;
  busy(true);
  try {
    await work(abort.signal);
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
    else if (state.abort === abort) stopped();
  } finally {
    if (state.abort === abort) {
      state.abort = null;
      busy(false);
    }
  }
}

function busy(working) {
  $("votes").setAttribute("aria-busy", working);
  $("stop").hidden = !working;
  document.body.classList.toggle("busy", working);
}

function stopped() {
  if (state.result) return;
  $("answer-words").textContent = "Stopped. Votes that were not all cast certify nothing.";
  $("noise").hidden = true;
}

async function ask(signal) {
  const n = Number($("count").value), drawn = !$("drawing").hidden;
  const image = drawn ? pad.image() : state.image;
  state.image = image;
  waitForVotes(image, n);
  $("votes").scrollIntoView({ block: "nearest" }); // on a phone the votes are below the image
  const result = await engine.certify(image, { n }, (cast, votes) => signal.aborted || arriving(cast, votes, n), signal);
  signal.throwIfAborted();
  state.result = { ...result, image };
  answer(result);
  attack.reset(image, result);
  $("noise").hidden = false;
  await showCopies(signal);
}

function waitForVotes(image, n) {
  state.result = null;
  $("attack").hidden = true;
  show($("middle"), image, facts.input_shape);
  bars.show(new Array(facts.classes).fill(0), n);
  Object.assign($("answer"), { textContent: "–" }).dataset.class = "";
  Object.assign($("radius"), { textContent: "–" }).dataset.radius = "";
  $("answer-words").textContent = "Counting votes …";
  $("radius-words").textContent = "The radius appears after the last vote.";
  drawBall();
}

function arriving(cast, votes, n) {
  bars.show(votes, n);
  $("tally").textContent = `${words.whole(cast)} of ${words.whole(n)} votes cast.`;
}

function answer(result) {
  const label = result.abstained ? -1 : result.selected;
  bars.show(result.votes, result.n, result.abstained ? null : label);
  Object.assign($("answer"), { textContent: result.abstained ? "?" : words.className(facts, label) }).dataset.class = label;
  Object.assign($("radius"), { textContent: result.abstained ? "–" : words.radiusText(result.radius) }).dataset.radius = result.radius;
  $("answer").classList.toggle("word", $("answer").textContent.length > 3);
  $("answer-words").textContent = words.answerWords(result);
  $("radius-words").textContent = words.radiusWords(result);
  $("tally").textContent = `All ${words.whole(result.n)} votes are cast, after ${words.whole(result.n0)} others that chose the class.`;
  drawBall();
  say(words.spoken(result, facts));
}

function drawBall() {
  const radius = state.result?.radius ?? 0;
  ball.show({ radius, picture: state.image && $("middle") });
  $("ball").setAttribute("aria-label", radius ? `A ball of radius ${words.radiusText(radius)} around your image` : "No certificate yet");
}

async function showCopies(signal) {
  const copies = await engine.noisy(state.image, COPIES);
  signal.throwIfAborted();
  $("copies").replaceChildren(...copies.map(copyTile));
}

function copyTile({ url, image, class: label }) {
  const tile = document.createElement("li"), picture = document.createElement(url ? "img" : "canvas");
  const name = label < 0 ? "no vote" : words.className(facts, label);
  if (url) picture.src = url;
  else show(picture, image, facts.input_shape);
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", "Copy with noise");
  picture.className = "pixels";
  tile.append(picture, Object.assign(document.createElement("span"), { textContent: name }));
  tile.classList.toggle("other", label !== state.result?.selected);
  return tile;
}

function say(text) {
  $("said").textContent = text;
}

function complain(error) {
  $("problem").textContent = error.message;
  $("problem").hidden = false;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  engine.useKey($("key").value);
  $("key-form").hidden = $("problem").hidden = true;
  start();
});
start().catch(complain);
