// A drawing as MNIST's makers prepared theirs: scaled to fit a box of 20 x 20 pixels, antialiased, and put into the 28 x 28
// image by whole pixels, so that the center of mass is in the pixel behind the middle. Other sizes keep these proportions.

const BOX = 20 / 28;

// `ink` is a square plane of `side` pixels in [0, 1], much finer than the result; returns `size` x `size`.
export function normalized(ink, side, size) {
  const box = bounds(ink, side);
  if (!box) return new Float32Array(size * size);
  const scale = (BOX * size) / Math.max(box.right - box.left, box.bottom - box.top);
  const [x, y] = centerOfMass(ink, side);
  const column = Math.ceil(size / 2 - (x - box.left) * scale), row = Math.ceil(size / 2 - (y - box.top) * scale);
  return resampled(ink, side, size, scale, column - box.left * scale, row - box.top * scale);
}

function bounds(ink, side) {
  let left = side, right = 0, top = side, bottom = 0;
  for (let i = 0; i < ink.length; i++) {
    if (ink[i] < 0.1) continue;
    const x = i % side, y = Math.floor(i / side);
    left = Math.min(left, x);
    right = Math.max(right, x + 1);
    top = Math.min(top, y);
    bottom = Math.max(bottom, y + 1);
  }
  return right > left ? { left, right, top, bottom } : null;
}

function centerOfMass(ink, side) {
  let mass = 0, x = 0, y = 0;
  for (let i = 0; i < ink.length; i++) {
    mass += ink[i];
    x += ink[i] * ((i % side) + 0.5);
    y += ink[i] * (Math.floor(i / side) + 0.5);
  }
  return [x / mass, y / mass];
}

// Each fine pixel's ink goes to the coarse pixels that it covers, by area: no ink is lost while it stays in the image.
function resampled(ink, side, size, scale, left, top) {
  const image = new Float32Array(size * size);
  const spread = (from, amount, put) => {
    for (let at = Math.floor(from); at < from + scale; at++) {
      const covered = Math.min(at + 1, from + scale) - Math.max(at, from);
      if (covered > 0 && at >= 0 && at < size) put(at, amount * covered);
    }
  };
  for (let i = 0; i < ink.length; i++) {
    if (ink[i] === 0) continue;
    const x = (i % side) * scale + left, y = Math.floor(i / side) * scale + top;
    spread(y, ink[i], (row, part) => spread(x, part, (column, share) => (image[row * size + column] += share)));
  }
  return image.map((value) => Math.min(1, value));
}
