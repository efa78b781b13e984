// The drawing area: mouse, touch and pen by pointer events, and a pen that the keyboard moves.

import { averaged } from "./image.js";
import { normalized } from "./digit.js";

const FINE = 10; // pixels of the drawing per pixel of the image
const BRUSH = 0.075; // of the side; about the stroke of MNIST's digits

export class Pad {
  // `changed(empty)` is called after each stroke; `ask()` on Enter; `say(text)` tells a screen reader what the keys did.
  constructor(canvas, size, centered, { changed, ask, say }) {
    Object.assign(this, { canvas, size, centered, changed, ask, say, side: size * FINE });
    canvas.width = canvas.height = this.side;
    this.pen = canvas.getContext("2d", { willReadFrequently: true });
    this.strokes = [];
    this.cursor = { x: this.side / 2, y: this.side / 2, down: false, shown: false };
    this.listen();
    this.paint();
  }

  get empty() {
    return this.strokes.length === 0;
  }

  clear() {
    this.strokes = [];
    this.finish();
  }

  undo() {
    this.strokes.pop();
    this.finish();
  }

  // The drawing as the model takes it.
  image() {
    this.paint(false);
    const { data } = this.pen.getImageData(0, 0, this.side, this.side);
    this.paint();
    const ink = Float32Array.from({ length: data.length / 4 }, (_, i) => data[4 * i] / 255);
    return this.centered ? normalized(ink, this.side, this.size) : averaged(ink, this.side, FINE);
  }

  finish() {
    this.paint();
    this.changed(this.empty);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => this.end());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.showCursor(canvas.matches(":focus-visible")));
    canvas.addEventListener("blur", () => this.showCursor(false));
  }

  at({ clientX, clientY }) {
    const box = this.canvas.getBoundingClientRect(), scale = this.side / box.width;
    return [(clientX - box.left) * scale, (clientY - box.top) * scale];
  }

  begin(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.cursor.shown = this.cursor.down = false;
    this.drawing = [this.at(event)];
    this.strokes.push(this.drawing);
    this.paint();
  }

  move(event) {
    if (!this.drawing) return;
    for (const part of event.getCoalescedEvents?.() ?? [event]) this.drawing.push(this.at(part));
    this.paint();
  }

  end() {
    if (!this.drawing) return;
    this.drawing = null;
    this.finish();
  }

  showCursor(shown) {
    this.cursor.shown = shown;
    if (!shown) this.lift();
    this.paint();
  }

  lift() {
    if (!this.cursor.down) return;
    this.cursor.down = false;
    this.finish();
  }

  key(event) {
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.ctrlKey || event.metaKey) {
      if (event.key !== "z") return;
      this.undo();
    } else if (event.key in arrows) this.step(arrows[event.key], event.shiftKey ? 3 : 1);
    else if (event.key === " ") this.toggle();
    else if (event.key === "Delete" || event.key === "Backspace") this.clear();
    else if (event.key === "Enter") {
      this.lift();
      this.ask();
    } else return;
    event.preventDefault();
  }

  step([dx, dy], times) {
    const { cursor, side } = this, length = (times * side) / 28;
    cursor.shown = true;
    cursor.x = Math.min(side, Math.max(0, cursor.x + dx * length));
    cursor.y = Math.min(side, Math.max(0, cursor.y + dy * length));
    if (cursor.down) this.strokes.at(-1).push([cursor.x, cursor.y]);
    this.paint();
  }

  toggle() {
    const { cursor } = this;
    cursor.shown = true;
    if (cursor.down) this.lift();
    else {
      cursor.down = true;
      this.strokes.push([[cursor.x, cursor.y]]);
      this.paint();
    }
    this.say(cursor.down ? "pen down" : "pen up");
  }

  paint(withCursor = true) {
    const { pen, side, cursor } = this;
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, side, side);
    Object.assign(pen, { strokeStyle: "#fff", lineWidth: side * BRUSH, lineCap: "round", lineJoin: "round" });
    this.strokes.forEach((stroke) => trace(pen, stroke));
    if (!withCursor || !cursor.shown) return;
    Object.assign(pen, { strokeStyle: cursor.down ? "#f08a66" : "#6fb0f0", lineWidth: side / 90 });
    pen.beginPath();
    pen.arc(cursor.x, cursor.y, side * BRUSH * 0.75, 0, 2 * Math.PI);
    pen.stroke();
  }
}

// A smooth line through the middles of the points.
function trace(pen, points) {
  pen.beginPath();
  pen.moveTo(...points[0]);
  for (let i = 1; i < points.length - 1; i++) {
    const [x, y] = points[i], [nextX, nextY] = points[i + 1];
    pen.quadraticCurveTo(x, y, (x + nextX) / 2, (y + nextY) / 2);
  }
  pen.lineTo(...points.at(-1));
  pen.stroke();
}
