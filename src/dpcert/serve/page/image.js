// Images as the model takes them: a Float32Array of [channels, height, width] with values in [0, 1].

// Nested lists [c][h][w], as the server takes them.
export function toNested(image, [channels, height, width]) {
  const row = (c, y) => Array.from(image.subarray((c * height + y) * width, (c * height + y + 1) * width));
  return Array.from({ length: channels }, (_, c) => Array.from({ length: height }, (_, y) => row(c, y)));
}

export function fromNested(nested) {
  return Float32Array.from(nested.flat(2));
}

// Draw an image pixel by pixel; values outside [0, 1] (noise) are shown as 0 or 1.
export function show(canvas, image, [channels, height, width]) {
  canvas.width = width;
  canvas.height = height;
  const pixels = new ImageData(width, height), size = width * height;
  for (let i = 0; i < size; i++) {
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = 255 * image[(channels === 1 ? 0 : c) * size + i] + 0.5;
    pixels.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

// What an attack changed, in the theme's colors of `canvas` (its style sets --up and --down): brighter pixels, darker pixels.
export function showDifference(canvas, before, after, [channels, height, width]) {
  canvas.width = width;
  canvas.height = height;
  const pixels = new ImageData(width, height), size = width * height, difference = new Float32Array(size);
  for (let i = 0; i < before.length; i++) difference[i % size] += (after[i] - before[i]) / channels;
  const most = Math.max(0.05, ...difference.map(Math.abs));
  const style = getComputedStyle(canvas), [up, down] = ["--up", "--down"].map((name) => parsed(style.getPropertyValue(name)));
  for (let i = 0; i < size; i++) {
    const share = Math.abs(difference[i]) / most, color = difference[i] > 0 ? up : down;
    pixels.data.set([...color, 255 * share], 4 * i);
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

function parsed(color) {
  const hex = color.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// Any picture file as an image of the model's shape: the middle square (in the model's proportions), averaged down.
export async function fromFile(file, [channels, height, width]) {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name || "this file"} is not a picture that the browser can read; use PNG or JPEG`);
  });
  const scale = Math.min(picture.width / width, picture.height / height);
  const factor = Math.max(1, Math.min(8, Math.ceil(scale))); // read at up to 8 times the size, then average
  const canvas = new OffscreenCanvas(width * factor, height * factor), pen = canvas.getContext("2d", { willReadFrequently: true });
  const [w, h] = [width * scale, height * scale];
  pen.imageSmoothingQuality = "high";
  pen.imageSmoothingEnabled = scale !== 1;
  pen.fillStyle = "#fff"; // behind transparent pixels
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(picture, (picture.width - w) / 2, (picture.height - h) / 2, w, h, 0, 0, canvas.width, canvas.height);
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height), image = new Float32Array(channels * height * width);
  for (let c = 0; c < channels; c++) {
    const plane = Float32Array.from({ length: data.length / 4 }, (_, i) => value(data, 4 * i, c, channels));
    image.set(averaged(plane, canvas.width, factor), c * height * width);
  }
  return { image, exact: picture.width === width && picture.height === height };
}

function value(data, at, channel, channels) {
  if (channels !== 1) return data[at + Math.min(channel, 2)] / 255;
  return (0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2]) / 255;
}

// Shrink a plane by a whole factor; each new pixel is the mean of the old ones.
export function averaged(plane, width, factor) {
  const w = width / factor, h = plane.length / width / factor, small = new Float32Array(w * h);
  for (let i = 0; i < plane.length; i++) {
    const x = Math.floor((i % width) / factor), y = Math.floor(i / width / factor);
    small[y * w + x] += plane[i] / (factor * factor);
  }
  return small;
}
