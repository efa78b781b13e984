// The formulas behind a certificate, as in certification/bounds.py; the tests compare them with SciPy to 1e-9.

const HALF_LOG_2PI = 0.5 * Math.log(2 * Math.PI);
const SERIES_ENDS = 3; // below it the series of the normal distribution is accurate, above it the continued fraction

// The one-sided Clopper-Pearson lower bound for a binomial probability.
// With probability at least 1 - alpha over the trials, the bound is at most the true probability.
export function lowerConfidenceBound(successes, trials, alpha) {
  if (successes === 0) return 0;
  if (successes === trials) return Math.exp(Math.log(alpha) / trials);
  const logAlpha = Math.log(alpha);
  let low = 0, high = 1;
  for (;;) { // the tail P(at least `successes` | p) grows with p; `low` keeps it at most alpha
    const middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) return low;
    if (logTail(successes, trials, middle) <= logAlpha) low = middle; else high = middle;
  }
}

// R = sigma * Phi^-1(p) (Cohen et al. 2019, Theorem 1); 0 if p <= 1/2.
export function certifiedRadius(pLower, sigma) {
  return pLower > 0.5 ? sigma * normalQuantile(pLower) : 0;
}

// z with Phi(z) = p, for 1/2 < p < 1: Newton's method on the logarithm of the upper tail. It is concave, so the steps from
// an upper bound, 1 - Phi(z) <= exp(-z^2 / 2) / 2, do not pass the solution.
export function normalQuantile(p) {
  const logTarget = Math.log(1 - p); // 1 - p is exact for p >= 1/2
  let z = Math.sqrt(-2 * (logTarget + Math.LN2));
  for (let step = 0; step < 100; step++) {
    const tail = upperTail(z), next = z + (Math.log(tail) - logTarget) * tail / density(z);
    if (Math.abs(next - z) <= 1e-16 * Math.abs(next)) return next;
    z = next;
  }
  return z;
}

function density(z) {
  return Math.exp(-0.5 * z * z - HALF_LOG_2PI);
}

// 1 - Phi(z) for z >= 0.
function upperTail(z) {
  if (z < SERIES_ENDS) {
    let term = z, sum = z;
    for (let odd = 3; term > 1e-18 * sum; odd += 2) sum += term *= z * z / odd;
    return 0.5 - density(z) * sum;
  }
  let fraction = z;
  for (let k = 120; k > 0; k--) fraction = z + k / fraction;
  return density(z) / fraction;
}

// log P(at least `successes` of `trials`) at probability p = log I_p(a, b), the regularized incomplete beta function.
function logTail(successes, trials, p) {
  const a = successes, b = trials - successes + 1;
  if (p > (a + 1) / (a + b + 2)) return Math.log1p(-Math.exp(logBelow(b, a, 1 - p)));
  return logBelow(a, b, p);
}

// The terms of Stirling's formula are combined by hand: their sum is small, and each of them is large.
function logBelow(a, b, x) {
  const n = a + b;
  const deviance = a * Math.log(a / (n * x)) + b * Math.log(b / (n * (1 - x)));
  const corrections = stirlingError(n) - stirlingError(a) - stirlingError(b);
  return corrections - deviance + 0.5 * Math.log(b / (n * a)) - HALF_LOG_2PI + Math.log(betaFraction(a, b, x));
}

// The continued fraction of the incomplete beta function, by Lentz's method; converges fast for x < (a + 1) / (a + b + 2).
function betaFraction(a, b, x) {
  let c = 1, d = 1 / (1 - (a + b) * x / (a + 1)), value = d;
  for (let m = 1; m < 100000; m++) {
    const even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    d = 1 / (1 + even * d);
    c = 1 + even / c;
    value *= c * d;
    const odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    d = 1 / (1 + odd * d);
    c = 1 + odd / c;
    value *= c * d;
    if (Math.abs(c * d - 1) < 1e-16) break;
  }
  return value;
}

// log Gamma(z) - ((z - 1/2) log z - z + log(2 pi) / 2) for a whole number z, to 1e-15: a series from 20 on, below it from z!.
function stirlingError(z) {
  if (z < 20) {
    let logGamma = 0;
    for (let k = 2; k < z; k++) logGamma += Math.log(k);
    return logGamma - ((z - 0.5) * Math.log(z) - z + HALF_LOG_2PI);
  }
  const w = 1 / (z * z);
  return (1 / 12 - w * (1 / 360 - w * (1 / 1260 - w * (1 / 1680 - w / 1188)))) / z;
}
