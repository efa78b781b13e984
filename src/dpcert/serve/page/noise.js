// Gaussian noise from the browser's cryptographic generator. Nobody can predict it, and nothing reuses it.

const WORDS_PER_CALL = 16384; // getRandomValues gives at most 65,536 bytes
const TO_UNIT = 2 ** -53;

// Fill `target` with independent standard normal numbers, by Box and Muller. The radius has 53 random bits: no value is
// cut off below 8.5 standard deviations.
export function fillNormal(target, draw = (words) => crypto.getRandomValues(words)) {
  const words = new Uint32Array(WORDS_PER_CALL);
  let next = WORDS_PER_CALL;
  for (let i = 0; i < target.length; i += 2) {
    if (next === WORDS_PER_CALL) {
      draw(words);
      next = 0;
    }
    const radius = Math.sqrt(-2 * Math.log(1 - unit(words[next], words[next + 1])));
    const angle = 2 * Math.PI * unit(words[next + 2], words[next + 3]);
    target[i] = radius * Math.cos(angle);
    if (i + 1 < target.length) target[i + 1] = radius * Math.sin(angle);
    next += 4;
  }
  return target;
}

// A multiple of 2^-53 in [0, 1).
function unit(high, low) {
  return ((high >>> 5) * 67108864 + (low >>> 6)) * TO_UNIT;
}

// `rows` copies of `image`, each with its own noise of standard deviation `sigma`; never clamped.
export function noisyCopies(image, rows, sigma) {
  const copies = fillNormal(new Float32Array(rows * image.length));
  for (let row = 0, i = 0; row < rows; row++) {
    for (let j = 0; j < image.length; j++, i++) copies[i] = image[j] + sigma * copies[i];
  }
  return copies;
}
