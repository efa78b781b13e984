// Numbers and sentences. Bounds are rounded to the safe side: a radius down, a probability of error up.

const DATASETS = { mnist: "handwritten digits (MNIST)", "fashion-mnist": "pieces of clothing (Fashion-MNIST)", cifar10: "small photos (CIFAR-10)" };

export const whole = (number) => number.toLocaleString("en-US");
export const radiusText = (radius) => (Math.floor(radius * 1000) / 1000).toFixed(3);
export const distanceText = (distance) => (Math.ceil(distance * 1000 - 1e-6) / 1000).toFixed(3);
const percent = (share, digits = 15) => `${Number((100 * share).toPrecision(digits))}\u00a0%`;
const nb = "\u00a0"; // between a symbol and its number
const epsilonText = (epsilon) => (Math.ceil(epsilon * 100 - 1e-9) / 100).toFixed(2);

// 1 - alpha, never rounded up to certainty.
function confidence({ alpha }) {
  return alpha < 1e-12 ? "more than 99.9999999999\u00a0%" : percent(1 - alpha);
}

// The name of a class: "7", or "ankle boot".
export function className(facts, label) {
  return facts.class_names?.[label] ?? String(label);
}

export function lead(facts) {
  const data = DATASETS[facts.dataset] ?? facts.dataset, { privacy } = facts;
  const guard = privacy.private
    ? `It was trained on ${data} with differential privacy (${budget(privacy)}).`
    : `It was trained on ${data}, without privacy for the training images.`;
  return `This classifier answers by vote, and proves how far an image can change before its answer can. ${guard}`;
}

// Epsilon, rounded up, never without its delta.
function budget({ epsilon, delta }) {
  return `ε${nb}=${nb}${epsilonText(epsilon)}, δ${nb}=${nb}${delta < 0.001 ? delta.toExponential() : delta}`;
}

export function answerWords(result) {
  if (result.abstained) return "No answer: no class has a clear majority.";
  return `${whole(result.count)} of ${whole(result.n)} votes`;
}

export function radiusWords(result) {
  if (result.abstained) return "No certificate. More votes may help.";
  return `L2 radius, with ${confidence(result)} confidence`;
}

// What a screen reader says at the end.
export function spoken(result, facts) {
  if (result.abstained) return "The model gives no answer: no class has a clear majority.";
  return `Answer: ${className(facts, result.selected)}, with ${answerWords(result)}. Certified radius ${radiusText(result.radius)}.`;
}

export function attackState(distance, result, facts) {
  const name = className(facts, result.selected), radius = radiusText(result.radius);
  if (distance < result.radius) {
    return `Inside the certificate (${distanceText(distance)} of ${radius}). Promised: the answer is ${name}, for this and every other change shorter than ${radius}.`;
  }
  return `Beyond the certificate (${distanceText(distance)}, certified up to ${radius}). Nothing is promised here: the answer may stay ${name}, or change.`;
}

// One line about an attacked image that was asked: what came back, and what this means for the certificate.
export function askedWords(distance, again, result, facts) {
  const inside = distance < result.radius, at = `At ${distanceText(distance)}`, name = className(facts, again.selected);
  if (again.abstained) return `${at}: no answer, no class has a clear majority.${inside ? " The promise is about which answer, not how clear it is." : ""}`;
  if (again.selected === result.selected) return `${at}: still ${name}, ${inside ? "as promised" : "though not promised"}.`;
  if (inside) return `${at}: ${name}. This contradicts the certificate; it happens with probability at most ${percent(2 * result.alpha)}.`;
  return `${at}: now ${name}. The attack works, beyond the certificate.`;
}

export function promised(facts) {
  const { privacy } = facts, rows = [
    ["Robustness", "An answer with a radius does not change for any change of the pixels that is shorter than the radius, in L2 length. This holds against every change, also by someone who knows the model."],
    ["Confidence", `Each certificate holds with probability at least ${confidence(facts)} over its random votes (α = ${facts.alpha}). Each answer draws new noise.`],
  ];
  if (privacy.private) {
    rows.push(["Privacy of the training images", `Removing any single training image, or adding one, makes no result of the training more likely than e^ε times its previous probability plus δ (${budget(privacy)}).`]);
  }
  return rows;
}

export function notPromised(facts) {
  const rows = [["That the answer is right", `A wrong answer can be certified too. ${tested(facts)}`.trim()]];
  if (!facts.privacy.private) rows.push(["Privacy of the training images", `This model has none (ε = ∞: ${facts.privacy.reason}).`]);
  rows.push(
    ["Anything beyond the radius", "Shifts, rotations or other lighting usually move an image further than its radius, even if they look small."],
    ["The best of several answers", `α is per answer. If you ask again until you like the result, ${confidence(facts)} no longer applies to the one that you keep.`],
    ["Privacy of your own image", "The privacy guarantee covers the training images, not what you draw or open here."],
  );
  return rows;
}

function tested(facts) {
  const figures = facts.certification.find((entry) => entry.sigma === facts.sigma);
  const share = figures?.certified_accuracy?.["0.25"];
  if (share === undefined) return "";
  return `Of ${whole(figures.examples)} test images, ${percent(share, 3)} got the right answer with a radius of at least 0.25.`;
}
