// Settings of all conversations: system prompt, temperature, length of answers, sources. This browser stores them; with a
// credential only for as long as the tab is open.
import { credential } from "./credential.js";
import { html } from "./html.js";
import { Store, useStore } from "./store.js";

const KEPT = "longleaf.settings";
const DEFAULTS = { system: "", temperature: "", length: "", sources: "" };
// Spans that are requested as sources of an answer.
const NUM_SOURCES = 5;
const LONGEST_SYSTEM = 20_000;
// Limit of an answer unless the reader sets one, because a model may never generate its end token.
export const MOST_TOKENS = 4096;

export const settings = new Store(read());

function read() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? localStorage.getItem(KEPT)) ?? {};
    return Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, typeof kept[name] === "string" ? kept[name] : value]));
  } catch {
    return DEFAULTS;
  }
}

function change(fields) {
  settings.patch(fields);
  try {
    (credential.secret ? sessionStorage : localStorage).setItem(KEPT, JSON.stringify(settings.value));
  } catch {
    // storage may be forbidden: the settings then last until a reload
  }
}

/** A number in a range; null if the text is empty or something else. */
function numberOf(text, least, most) {
  const value = Number(text.trim().replace(",", "."));
  return text.trim() && value >= least && value <= most ? value : null;
}

const temperature = () => numberOf(settings.value.temperature, 0, 2);
const length = () => {
  const value = numberOf(settings.value.length, 1, 1 << 20);
  return Number.isInteger(value) ? value : null;
};

/** The fields of a request. `room` is the number of tokens that the model has left for the answer, or less. */
export function requestFields(room) {
  const most = length() ?? (room >= MOST_TOKENS ? MOST_TOKENS : null); // null: the capacity that the service has left
  return {
    ...(temperature() === null ? {} : { temperature: temperature() }),
    ...(most === null ? {} : { max_tokens: most }),
  };
}

/** The field that asks for the sources of an answer about a document. */
export const sourceFields = () => (settings.value.sources ? { sources: { count: NUM_SOURCES } } : {});

export function SourceSwitch() {
  const { sources } = useStore(settings);
  return html`<label><input type="checkbox" role="switch" checked=${!!sources}
    onChange=${({ currentTarget }) => change({ sources: currentTarget.checked ? "on" : "" })} /> Show sources</label>`;
}

/** The system message, as a list of at most one. */
export const systemMessages = () => (settings.value.system.trim() ? [{ role: "system", content: settings.value.system.trim() }] : []);

export function Settings() {
  const { system, temperature: warmth, length: most } = useStore(settings);
  const isChanged = [system, warmth, most].some((value) => value.trim());
  const isWarmthWrong = warmth.trim() && temperature() === null;
  const isLengthWrong = most.trim() && length() === null;
  return html`<details class="settings"><summary>Settings${isChanged ? " (changed)" : ""}</summary>
    <label class="field">System prompt
      <textarea rows="2" maxlength=${LONGEST_SYSTEM} value=${system} onInput=${({ currentTarget }) => change({ system: currentTarget.value })}></textarea></label>
    <div class="pair">
      <label class="field">Temperature, 0 to 2
        <input inputmode="decimal" value=${warmth} placeholder="the service's" aria-invalid=${isWarmthWrong ? "true" : null}
          onInput=${({ currentTarget }) => change({ temperature: currentTarget.value })} /></label>
      <label class="field">Longest answer, in tokens
        <input inputmode="numeric" value=${most} placeholder="4,096" aria-invalid=${isLengthWrong ? "true" : null}
          onInput=${({ currentTarget }) => change({ length: currentTarget.value })} /></label>
    </div>
    ${(isWarmthWrong || isLengthWrong) && html`<p class="error" role="alert">A marked value is invalid and is not used.</p>`}
    <p class="quiet">They apply to all conversations, from the next question on.</p>
  </details>`;
}
