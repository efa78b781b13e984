// CERTIFY of Cohen et al. (2019) in the browser, with the rules of certification/smooth.py and certification/votes.py.

import { certifiedRadius, lowerConfidenceBound } from "./bounds.js";
import { noisyCopies } from "./noise.js";

const TIE_TOLERANCE = 2 ** -16; // relative to the largest logit, as on the server
const ROWS = 128;
const ATTACK_STEPS = 20, ATTACK_BATCHES = 8;

// The class a row of logits votes for; -1 (no class) if a logit is NaN or the two largest differ by less than rounding.
export function voteOf(logits) {
  let best = -1, first = -Infinity, second = -Infinity, largest = 0;
  for (let i = 0; i < logits.length; i++) {
    const value = logits[i];
    if (Number.isNaN(value)) return -1;
    largest = Math.max(largest, Math.abs(value));
    if (value > first) {
      second = first;
      first = value;
      best = i;
    } else if (value > second) {
      second = value;
    }
  }
  return Math.fround(first - second) > Math.fround(TIE_TOLERANCE * largest) ? best : -1;
}

// A class and an L2 radius, or none. With probability at least 1 - alpha over the noise, either there is no class or the
// smoothed classifier predicts `class` for every image closer than `radius`. The class is chosen by `n0` votes that are not
// counted again. `run(rows, count)` returns the logits of `count` rows; `tell(phase, cast, votes)` is called now and then.
export async function certify(run, image, classes, { n0, n, alpha, sigma }, tell = () => {}) {
  const selection = await castVotes(run, image, classes, n0, sigma, (cast, votes) => tell("selection", cast, votes));
  const selected = selection.indexOf(Math.max(...selection));
  const votes = await castVotes(run, image, classes, n, sigma, (cast, now) => tell("estimation", cast, now));
  const pLower = lowerConfidenceBound(votes[selected], n, alpha);
  const radius = certifiedRadius(pLower, sigma);
  return { selected, abstained: !(radius > 0), radius, votes, count: votes[selected], pLower, n0, n, alpha, sigma };
}

async function castVotes(run, image, classes, total, sigma, tell) {
  const votes = new Array(classes).fill(0);
  for (let cast = 0; cast < total;) {
    const rows = Math.min(ROWS, total - cast);
    const logits = await run(noisyCopies(image, rows, sigma), rows);
    for (let row = 0; row < rows; row++) {
      const vote = voteOf(logits.subarray(row * classes, (row + 1) * classes));
      if (vote >= 0) votes[vote]++;
    }
    cast += rows;
    await tell(cast, votes);
  }
  return votes;
}

// An image at most `strength` (L2) from `image`, pixels in [0, 1], on which the smoothed classifier loses class `label`:
// ascent in steps, each along an estimated gradient, back into the ball and the box after each.
export async function attack(run, image, classes, label, sigma, strength, tell = () => {}) {
  let moved = image.slice(), heading = new Float64Array(image.length);
  for (let step = 0; step < ATTACK_STEPS; step++) {
    const uphill = await estimatedGradient(run, moved, classes, label, sigma);
    heading = heading.map((old, j) => 0.75 * old + uphill[j]); // averages out the error of the estimates
    moved = projected(image, moved, heading, strength, (2.5 * strength) / ATTACK_STEPS);
    await tell(step + 1, ATTACK_STEPS);
  }
  return moved;
}

// The gradient of the class's log-odds, downwards and of length 1, from logits alone: by Stein's identity the gradient of
// E[f(x + noise)] is E[noise * f(x + noise)] / sigma^2.
export async function estimatedGradient(run, image, classes, label, sigma) {
  const weighted = new Float64Array(image.length), plain = new Float64Array(image.length);
  let total = 0;
  for (let part = 0; part < ATTACK_BATCHES; part++) {
    const rows = noisyCopies(image, ROWS, sigma), logits = await run(rows, ROWS);
    for (let row = 0; row < ROWS; row++) {
      const odds = logOdds(logits.subarray(row * classes, (row + 1) * classes), label);
      total += odds;
      for (let j = 0, i = row * image.length; j < image.length; j++, i++) {
        weighted[j] += odds * (rows[i] - image[j]);
        plain[j] += rows[i] - image[j];
      }
    }
  }
  const mean = total / (ROWS * ATTACK_BATCHES); // subtracting it removes most of the variance
  return unitLength(plain.map((noise, j) => mean * noise - weighted[j]));
}

// Move by `length` along `heading` where the box [0, 1] allows it, then back to at most `strength` from `image`.
function projected(image, moved, heading, strength, length) {
  const free = unitLength(heading.map((value, j) => ((value > 0 ? moved[j] < 1 : moved[j] > 0) ? value : 0)));
  const stepped = moved.map((pixel, j) => Math.min(1, Math.max(0, pixel + length * free[j])));
  const shrink = Math.min(1, (strength * (1 - 1e-6)) / distance(image, stepped));
  return stepped.map((pixel, j) => image[j] + shrink * (pixel - image[j]));
}

// Euclidean distance of two images.
export function distance(a, b) {
  let sum = 0;
  for (let j = 0; j < a.length; j++) sum += (a[j] - b[j]) ** 2;
  return Math.sqrt(sum);
}

function logOdds(logits, label) {
  let most = -Infinity;
  for (let i = 0; i < logits.length; i++) if (i !== label) most = Math.max(most, logits[i]);
  let others = 0;
  for (let i = 0; i < logits.length; i++) if (i !== label) others += Math.exp(logits[i] - most);
  const odds = logits[label] - most - Math.log(others);
  return Number.isFinite(odds) ? odds : 0;
}

function unitLength(vector) {
  const norm = distance(vector, new Float64Array(vector.length));
  return Float32Array.from(vector, (value) => (norm > 0 ? value / norm : 1 / Math.sqrt(vector.length)));
}
