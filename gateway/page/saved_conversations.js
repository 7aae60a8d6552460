// Conversations in the browser's storage, so that they survive a reload. With a credential they last as long as the
// tab, and only the same credential finds them.
import { credential } from "./credential.js";

const PREFIX = "longleaf.conversation.";
const MOST = 30;
// Limits in characters, for one conversation (the oldest turns are dropped) and for all.
const LONGEST = 300_000;
const ALL = 2_000_000;
const TEXTS = ["question", "answer"];

/** The saved turns of a conversation about a context that was created at this time. */
export function load(id, created) {
  try {
    const saved = JSON.parse(storage().getItem(keyOf(id)));
    if (saved?.created !== created) return [];
    return saved.turns.filter((turn) => TEXTS.every((name) => typeof turn[name] === "string")).map(settled);
  } catch {
    return []; // no storage, or something else under this name
  }
}

export function save(id, created, turns) {
  const saved = turns.filter(({ answer }) => answer).map(settled);
  let size = saved.reduce((sum, turn) => sum + sizeOf(turn), 0);
  while (size > LONGEST && saved.length > 1) size -= sizeOf(saved.shift());
  try {
    if (!saved.length || size > LONGEST) storage().removeItem(keyOf(id));
    else storage().setItem(keyOf(id), JSON.stringify({ created, used: Date.now(), turns: saved }));
    prune();
  } catch {
    // storage may be forbidden or full: this conversation then does not survive a reload
  }
}

const sizeOf = ({ question, answer, sources }) => question.length + answer.length + 200 + (sources ? JSON.stringify(sources).length : 0);

/** A turn that is not being answered. */
function settled({ question, answer, phase, reason, sources, usage, seconds, firstSeconds }) {
  const end = phase === "done" ? "done" : "stopped";
  return { question, answer, phase: end, note: "", error: null, reason, sources: places(sources), usage: usage ?? null, seconds: seconds ?? null, firstSeconds: firstSeconds ?? null };
}

/** Sources without their text, which the document has; null if there are none. */
function places(sources) {
  const isRange = (range) => Array.isArray(range) && range.length === 2 && range.every(Number.isInteger);
  const isSource = (each) => typeof each?.label === "string" && typeof each.share === "number" && isRange(each.tokens);
  if (!Array.isArray(sources) || !sources.every(isSource)) return null;
  return sources.map(({ label, share, tokens, bytes }) => ({ label, share, tokens, bytes: isRange(bytes) ? bytes : null }));
}

/** Removes the conversations that were used least recently. */
function prune() {
  const kept = storage();
  const keys = Array.from({ length: kept.length }, (_, index) => kept.key(index)).filter((key) => key.startsWith(PREFIX));
  const found = keys.map((key) => [key, kept.getItem(key)]).sort(([, a], [, b]) => usedAt(b) - usedAt(a));
  let size = 0;
  found.forEach(([key, value], index) => {
    size += value.length;
    if (index >= MOST || (index > 0 && size > ALL)) kept.removeItem(key);
  });
}

function usedAt(value) {
  try {
    return JSON.parse(value).used ?? 0;
  } catch {
    return 0;
  }
}

const storage = () => (credential.secret ? sessionStorage : localStorage);

const keyOf = (id) => `${PREFIX}${credential.secret ? `${hash(credential.secret)}.` : ""}${id}`;

/** FNV-1a of 32 bits: too short to reveal the credential. */
function hash(text) {
  let value = 0x811c9dc5;
  for (const unit of new TextEncoder().encode(text)) value = Math.imul(value ^ unit, 0x01000193) >>> 0;
  return value.toString(16);
}
