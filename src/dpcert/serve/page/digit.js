// A drawing as MNIST's makers prepared theirs: scaled to fit a 20 x 20 box of the 28 x 28 image, antialiased, and moved so
// that its center of mass is the center of the image. Other sizes keep these proportions.

const BOX = 20 / 28;

// `ink` is a square plane of `side` pixels in [0, 1], much finer than the result; returns `size` x `size`.
export function normalized(ink, side, size) {
  const box = bounds(ink, side);
  if (!box) return new Float32Array(size * size);
  const scale = (BOX * size) / Math.max(box.right - box.left, box.bottom - box.top);
  const [x, y] = centerOfMass(ink, side);
  return resampled(ink, side, size, scale, x, y);
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
function resampled(ink, side, size, scale, centerX, centerY) {
  const image = new Float32Array(size * size);
  const spread = (from, amount, put) => {
    for (let at = Math.floor(from); at < from + scale; at++) {
      const covered = Math.min(at + 1, from + scale) - Math.max(at, from);
      if (covered > 0 && at >= 0 && at < size) put(at, amount * covered);
    }
  };
  for (let i = 0; i < ink.length; i++) {
    if (ink[i] === 0) continue;
    const x = ((i % side) - centerX) * scale + size / 2, y = (Math.floor(i / side) - centerY) * scale + size / 2;
    spread(y, ink[i], (row, part) => spread(x, part, (column, share) => (image[row * size + column] += share)));
  }
  return image.map((value) => Math.min(1, value));
}
