// The certificate as a picture: your image in the middle, the ball of images that get the same answer, the attack's path.

const SVG = "http://www.w3.org/2000/svg", SIZE = 320, CENTER = SIZE / 2, OUTER = 138;
const SMALLEST = 22, LARGEST = 52; // the picture in the middle

function element(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// Round distances up to `most`, at most five.
function distances(most) {
  const step = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5].find((size) => most / size <= 5) ?? 10;
  return Array.from({ length: Math.floor(most / step + 1e-9) }, (_, k) => Number(((k + 1) * step).toFixed(3)));
}

export class Ball {
  constructor(root) {
    this.root = root;
    this.svg = element("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, "aria-hidden": "true" });
    root.replaceChildren(this.svg);
    this.show({});
  }

  // `radius` of the certificate (0: none), `reach` = the largest distance of the picture, `picture` = a canvas for the middle,
  // `asked` = attacked images that were asked [{distance, kind: same|other|none}], `at` = the distance of the slider.
  show({ radius = 0, reach = 0, picture = null, asked = [], at = null }) {
    const most = Math.max(reach, 1.35 * radius, 0.1), scale = OUTER / most;
    this.side = radius ? Math.min(LARGEST, Math.max(SMALLEST, 1.1 * radius * scale)) : LARGEST;
    this.svg.replaceChildren(
      ...this.rings(most, scale, radius), ...this.disc(radius * scale), ...this.ticks(most, scale, radius),
      ...this.label(radius, scale), ...this.middle(picture), ...this.path(at, asked, scale),
    );
  }

  rings(most, scale, radius) {
    if (!radius) return [element("circle", { class: "ring empty", cx: CENTER, cy: CENTER, r: OUTER * 0.72 })];
    return distances(most).map((at) => element("circle", { class: "ring", cx: CENTER, cy: CENTER, r: at * scale }));
  }

  ticks(most, scale, radius) {
    const shown = radius ? distances(most).filter((at) => at * scale > this.side / 2 + 10) : [];
    return shown.map((at) => element("text", { class: "tick", x: CENTER, y: CENTER + at * scale - 4 }, String(at)));
  }

  disc(r) {
    return r > 0 ? [element("circle", { class: "disc", cx: CENTER, cy: CENTER, r })] : [];
  }

  path(at, asked, scale) {
    if (at === null) return [];
    const x = (distance) => CENTER + distance * scale;
    const dots = asked.map(({ distance, kind }) => element("circle", { class: `asked-dot ${kind}`, cx: x(distance), cy: CENTER, r: 5 }));
    return [element("path", { class: "ray", d: `M${CENTER + this.side / 2} ${CENTER}H${CENTER + OUTER}` }), ...dots, element("circle", { class: "here", cx: x(at), cy: CENTER, r: 7.5 })];
  }

  middle(picture) {
    if (!picture) return [element("circle", { class: "dot", cx: CENTER, cy: CENTER, r: 4 })];
    const { side } = this, corner = CENTER - side / 2, href = picture.toDataURL(), box = { x: corner, y: corner, width: side, height: side };
    return [element("image", { ...box, href, preserveAspectRatio: "xMidYMid meet" }), element("rect", { class: "frame", ...box, rx: 3 })];
  }

  label(radius, scale) {
    if (!radius) return [];
    const edge = CENTER - radius * scale * Math.SQRT1_2; // on the upper left of the ball
    return [element("path", { class: "spoke", d: `M${CENTER} ${CENTER}L${edge} ${edge}` }), element("circle", { class: "edge", cx: edge, cy: edge, r: 3 })];
  }
}
