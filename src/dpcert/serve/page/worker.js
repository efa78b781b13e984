// Runs the model outside the page's thread: ONNX Runtime as WebAssembly, one thread, no network after its three files.

import * as ort from "./ort.js";
import { attack, certify, voteOf } from "./smooth.js";
import { noisyCopies } from "./noise.js";

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = { wasm: new URL("./ort.wasm", import.meta.url).href };

let session = null, facts = null;
const stopped = new Set();

const jobs = {
  async open({ model, ...rest }) {
    facts = rest.facts;
    session = await ort.InferenceSession.create(new Uint8Array(model), { executionProviders: ["wasm"] });
  },
  certify: ({ image, request }, tell) => certify(run, image, facts.classes, request, tell),
  async noisy({ image, count }) {
    const rows = noisyCopies(image, count, facts.sigma), logits = await run(rows, count), size = image.length;
    return Array.from({ length: count }, (_, i) => ({
      image: rows.slice(i * size, (i + 1) * size),
      class: voteOf(logits.subarray(i * facts.classes, (i + 1) * facts.classes)),
    }));
  },
  attack: ({ image, label, strength }, tell) => attack(run, image, facts.classes, label, facts.sigma, strength, tell),
  logits: ({ rows, count }) => run(rows, count), // for the tests: compared with PyTorch's
};

async function run(rows, count) {
  const results = await session.run({ rows: new ort.Tensor("float32", rows, [count, ...facts.input_shape]) });
  return results.logits.data;
}

// Let messages in between two batches, so that a request can be stopped.
function breath() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => (port1.close(), resolve());
    port2.postMessage(0);
  });
}

onmessage = async ({ data: { id, job, ...values } }) => {
  if (job === "stop") return void stopped.add(id);
  const tell = async (...news) => {
    postMessage({ id, news });
    await breath();
    if (stopped.delete(id)) throw new Error("stopped");
  };
  try {
    postMessage({ id, done: await jobs[job](values, tell) });
  } catch (error) {
    postMessage({ id, error: String(error.message ?? error) });
  }
};
