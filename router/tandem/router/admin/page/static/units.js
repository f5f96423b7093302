// Figures for people. A dash is "not known".

const DASH = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export function seconds(value) {
  if (!known(value)) return DASH;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return value < 100 ? `${value.toPrecision(3)} s` : `${value.toFixed(0)} s`;
}

export function count(value) {
  if (!known(value)) return DASH;
  if (value >= 1e6) return `${threeDigits(value / 1e6)} M`;
  if (value >= 1e4) return `${threeDigits(value / 1e3)} k`;
  return Number.isInteger(value) ? String(value) : threeDigits(value);
}

// Of 999.6 and more, all digits before the point: never an exponent.
const threeDigits = (value) => (value >= 100 ? value.toFixed(0) : value.toPrecision(3));

export function share(value) {
  return known(value) ? `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %` : DASH;
}

export function rate(bytesPerS) {
  if (!known(bytesPerS) || bytesPerS <= 0) return DASH;
  return bytesPerS >= 1e8 ? `${(bytesPerS / 1e9).toFixed(2)} GB/s` : `${(bytesPerS / 1e6).toPrecision(3)} MB/s`;
}

export function moment(timeS) {
  return new Date(1000 * timeS).toLocaleTimeString([], { hour12: false });
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
