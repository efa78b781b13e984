// The attack: move the image away from its answer, inside the certificate and beyond it.

import { Ball } from "./ball.js";
import { distance } from "./smooth.js";
import { show, showDifference } from "./image.js";
import { askedWords, attackState, distanceText, radiusText } from "./words.js";

const $ = (id) => document.getElementById(id);
const STEPS = 1000; // of the slider
const BEYOND = 3; // the path ends at this multiple of the radius
const SHORTEST = 1; // but not before this distance
const FURTHEST = 10; // the longest attack that the server makes
const WALK = 12; // images asked on the way out, at most

export class Attack {
  // `task(work)` runs one request at a time and reports its errors; `votes()` is how many to cast for an answer.
  constructor(engine, facts, { task, votes }) {
    Object.assign(this, { engine, facts, votes, ball: new Ball($("path")) });
    $("find").addEventListener("click", () => task(this.find.bind(this)));
    $("recheck").addEventListener("click", () => task(this.recheck.bind(this)));
    $("walk").addEventListener("click", () => task(this.walk.bind(this)));
    $("strength").addEventListener("input", () => this.slide());
  }

  // Start again for a new image and its certificate.
  reset(image, result) {
    Object.assign(this, { image, result, asked: [], end: null });
    $("attack").hidden = result.abstained;
    $("attack-stage").hidden = true;
    $("find-row").hidden = false;
    $("asked").replaceChildren();
  }

  async find(signal) {
    const { image, result, engine } = this;
    const strength = Math.min(FURTHEST, Math.max(SHORTEST, BEYOND * result.radius));
    const end = await engine.attack(image, result.selected, strength, signal);
    this.end = end;
    this.reach = distance(image, end);
    if (!(this.reach > 0)) throw new Error("The attack found no direction from this image; try another one.");
    $("strength").style.setProperty("--share", `${Math.min(100, (100 * result.radius) / this.reach)}%`);
    $("attack-stage").hidden = false;
    $("find-row").hidden = true;
    $("strength").value = Math.round((0.6 * STEPS * result.radius) / this.reach);
    show($("before"), image, this.facts.input_shape);
    this.slide();
    $("strength").focus();
  }

  // The point of the straight path from the image to the end of the attack; inside [0, 1], as both ends are.
  get point() {
    const share = $("strength").value / STEPS;
    return this.image.map((pixel, i) => pixel + share * (this.end[i] - pixel));
  }

  slide() {
    const { point, image, facts, result } = this, at = distance(image, point);
    $("distance").textContent = distanceText(at);
    $("strength").setAttribute("aria-valuetext", `${distanceText(at)}, ${at < result.radius ? "inside" : "beyond"} the certificate`);
    $("attack-state").textContent = attackState(at, result, facts);
    $("attack-state").dataset.inside = at < result.radius;
    $("attack-state").classList.toggle("none", at >= result.radius);
    show($("after"), point, facts.input_shape);
    showDifference($("change"), image, point, facts.input_shape);
    this.drawPath(at);
  }

  drawPath(at) {
    this.ball.show({ radius: this.result.radius, reach: this.reach, picture: $("before"), asked: this.asked, at });
    $("path").setAttribute("aria-label", `The attack at distance ${distanceText(at)}, the ball ends at ${radiusText(this.result.radius)}`);
  }

  async recheck(signal) {
    const { point, image, result, facts } = this, at = distance(image, point);
    const again = await this.engine.certify(point, { n: this.votes() }, () => {}, signal);
    const kind = again.abstained ? "none" : again.selected === result.selected ? "same" : "other";
    this.asked.push({ distance: at, kind });
    const line = this.note(askedWords(at, again, result, facts), kind);
    Object.assign(line.dataset, { class: again.abstained ? -1 : again.selected, distance: at, radius: again.radius });
    this.drawPath(at);
    return kind;
  }

  note(text, kind) {
    const line = Object.assign(document.createElement("li"), { className: kind, textContent: text });
    $("asked").prepend(line);
    return line;
  }

  // Ask at growing distances until another answer comes back, or the path ends.
  async walk(signal) {
    for (let step = 1; step <= WALK; step++) {
      $("strength").value = Math.round((STEPS * step) / WALK);
      this.slide();
      if ((await this.recheck(signal)) === "other") return;
    }
    this.note("End of the path: this attack finds no other answer.", "none");
  }
}
