// Numbers as people read them; the same rules as on the terminal's screen.

export const NONE = "–";

export function count(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) {
      const scaled = value / (letter === "k" ? 1e3 : size);
      return scaled.toFixed(scaled < 100 ? 1 : 0) + letter;
    }
  }
  return Math.round(value).toLocaleString("en");
}

export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const text = (100 * share).toFixed(0);
  // 99.7 % is not all of it, nor is 99.99 %; and 0.3 % is something.
  const apart = (text === "100" && share < 1) || (text === "0" && share > 0);
  return (apart ? Math.min(Math.max(100 * share, 0.1), 99.9).toFixed(1) : text) + " %";
}

export function decimal(value, digits = 3) {
  return value === null || value === undefined ? NONE : value.toFixed(digits);
}

// What `format_score` writes of a loss or a metric (protocol/statistics.py), sign for sign: below 1 it is never shown as
// 1, and Python's exponents have two digits (tests/observe/test_dashboard_words.py).
export function measure(value) {
  if (value === null || value === undefined) return NONE;
  const [sign, size] = [value < 0 ? "-" : "", Math.abs(value)];
  if (size === 0) return "0.00";
  if (size >= 1 && size < 1e4) return sign + roundEvenly(size, String(Math.trunc(size)).length + 2).toFixed(2);
  let digits = size < 1 ? 4 : 3;
  while (roundEvenly(size, digits) === 1 && digits < 17) digits += 1;
  const rounded = roundEvenly(size, digits);
  const [mantissa, power] = rounded.toExponential().split("e");
  if (power >= -4 && power < digits) return sign + String(rounded);
  return `${sign}${mantissa}e${power[0]}${power.slice(1).padStart(2, "0")}`;
}

// To so many digits. Of two numbers that are equally near Python takes the even one, JavaScript the larger.
function roundEvenly(size, digits) {
  const [exact, power] = size.toExponential(100).split("e");
  const all = exact.replace(".", "");
  const [kept, rest] = [all.slice(0, digits), all.slice(digits)];
  const isTie = /^50*$/.test(rest) && "02468".includes(kept.at(-1));
  return isTie ? Number(`${kept}e${power - digits + 1}`) : Number(size.toPrecision(digits));
}

export function clock(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const whole = Math.max(0, Math.floor(seconds));
  const two = (n) => String(n).padStart(2, "0");
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : clock(seconds);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function listing(names, most) {
  return names.length <= most ? names.join(", ") : `${names.slice(0, most).join(", ")} and ${names.length - most} more`;
}

// learner-2 before learner-10.
export const byName = new Intl.Collator("en", { numeric: true }).compare;
