// Formats of numbers and times.

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const moment = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "short" });

export const count = (value) => number.format(value);

export const tokens = (value) => `${count(value)} ${value === 1 ? "token" : "tokens"}`;

/** The approximate number of English words in a number of tokens. */
export const words = (value) => `${count(Number((0.75 * value).toPrecision(1)))} words`;

export function bytes(value) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; value >= 999.5 && at < units.length - 1; at += 1) value /= 1000;
  return `${short.format(at ? value : Math.round(value))} ${value === 1 && !at ? "byte" : units[at]}`;
}

export function percent(part, whole) {
  if (!whole || !part) return "0 %";
  const value = (100 * part) / whole;
  if (value < 1) return "under 1 %";
  return `${part < whole ? Math.min(99, Math.round(value)) : 100} %`; // 100 % only when complete
}

/** A rounded duration. */
export function duration(seconds) {
  const steps = [[90, 1, "s"], [90 * 60, 60, "min"], [36 * 3600, 3600, "h"], [Infinity, 86400, "days"]];
  const [, unit, name] = steps.find(([limit]) => seconds < limit);
  return `${Math.max(unit === 1 ? 0 : 1, Math.round(seconds / unit))} ${name}`;
}

export function ago(time, now) {
  const seconds = now - time;
  return seconds < 45 ? "just now" : `${duration(seconds)} ago`;
}

export function until(time, now) {
  const seconds = time - now;
  return seconds <= 0 ? "now" : `in ${duration(seconds)}`;
}

export const when = (time) => moment.format(time * 1000);

export const clock = (time) => new Date(time * 1000).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit" });
