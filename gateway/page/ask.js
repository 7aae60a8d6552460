// Questions about the open document, or without one: the conversation, and the field for the next question.
import { useNow } from "./clock.js";
import { conversationAbout, goingOn } from "./conversation.js";
import { isFinal, Refusal, sentence } from "./errors.js";
import { count, duration, tokens } from "./format.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { Markdown } from "./markdown.js";
import { CHAT } from "./route.js";
import { service } from "./service.js";
import { Settings, settings, SourceSwitch } from "./settings.js";
import { Sources } from "./sources.js";
import { useStore } from "./store.js";

export function Ask({ id, created }) {
  const conversation = conversationAbout(id, created);
  const turns = useStore(conversation.store);
  return html`<section class="ask" aria-label="Questions and answers">
    ${turns.length > 0 && html`<ol class="turns">
      ${turns.map((turn, index) => html`<${Turn} key=${index} ...${{ turn, conversation, isLast: index === turns.length - 1 }} />`)}
    </ol>`}
    <${Field} conversation=${conversation} turns=${turns} />
  </section>`;
}

function Turn({ turn, conversation, isLast }) {
  const { question, answer, phase, error, sources } = turn;
  const isBusy = phase === "waiting" || phase === "writing";
  return html`<li>
    <p class="question">${question}</p>
    ${answer && html`<div class="answer" aria-busy=${isBusy}><${Markdown} text=${answer} /></div>`}
    ${phase === "waiting" && html`<p class="quiet pulse"><${Wait} note=${turn.note} /></p>`}
    ${phase === "stopped" && html`<p class="quiet">Stopped${answer ? "" : " before the answer began"}.</p>`}
    ${phase === "failed" && html`<${AnswerError} ...${{ error, conversation, isLast }} />`}
    ${turn.reason === "length" && !isBusy && html`<p class="cut">The answer was cut off after ${cutAfter(turn)}. Ask for the rest.</p>`}
    ${!isBusy && answer && sources && html`<${Sources} id=${conversation.id} sources=${sources} />`}
    ${!isBusy && answer && html`<${Foot} turn=${turn} />`}
  </li>`;
}

const cutAfter = ({ usage }) => (usage ? tokens(usage.completion_tokens) : "its longest length");

/** The reason for waiting, from the comments of the stream and the state of the cluster. */
function Wait({ note }) {
  const recovery = useStore(service.store).cluster?.recovery;
  if (recovery && !recovery.done) {
    const { recovered_tokens: back, lost_tokens: lost } = recovery;
    return `Restoring a lost part first: ${count(back)} of ${tokens(lost)}.`;
  }
  const [, place] = note.match(/^queued (\d+)$/) ?? [];
  if (place) return place === "1" ? "Next in the queue." : `In the queue: ${othersBefore(place)} before this one.`;
  const [, read, all] = note.match(/^read (\d+) of (\d+) tokens$/) ?? [];
  if (all) return `Reading: ${count(read)} of ${tokens(Number(all))}.`;
  return "Asking…";
}

const othersBefore = (place) => (place === "2" ? "one is" : `${count(place - 1)} are`);

function AnswerError({ error, conversation, isLast }) {
  const [failed] = useState(() => Date.now() / 1000);
  const now = useNow();
  const wait = (error instanceof Refusal && error.retryAfter) || 0;
  const left = wait && Math.ceil(failed + wait - now); // the clock may be a second behind
  useStore(goingOn.store);
  useStore(settings);
  const mayHelp = isLast && (!isFinal(error) || conversation.wouldDiffer);
  return html`<div class="error" role="alert"><p>${sentence(error)}</p>
    ${mayHelp && html`<button disabled=${left > 0} onClick=${() => conversation.again()}>
      ${left > 0 ? `Ask again in ${duration(left)}` : "Ask again"}
    </button>`}
  </div>`;
}

function Foot({ turn: { answer, usage, seconds, firstSeconds } }) {
  const [note, setNote] = useState("");
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return html`<p class="foot numbers">
    <button class="plain" onClick=${async () => setNote((await copy(answer)) ? "Copied" : "The browser blocked copying")}>Copy</button>
    <span role="status">${note}</span>
    ${seconds !== null && html`<span title=${firstSeconds === null ? null : `first token after ${firstSeconds.toFixed(2)} s`}>
      ${seconds.toFixed(1)} s</span>`}
    ${usage && html`<span>${tokens(usage.completion_tokens)} written</span>
      <span>read ${tokens(usage.prompt_tokens)}${cached ? `, ${count(cached)} of them from memory` : ""}</span>`}
  </p>`;
}

function Field({ conversation, turns }) {
  const [text, setText] = useState("");
  const field = useRef(null);
  const form = useRef(null);
  const seen = useRef({ end: 0, turns: 0 });
  const { isBusy } = conversation;
  useStore(goingOn.store);
  useStore(service.store);
  const isFirst = turns.length === 0;
  const isChat = conversation.id === CHAT;
  useLayoutEffect(() => {
    const { current: area } = field;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, 240)}px`;
  }, [text]);
  useEffect(() => {
    // Scroll to a new question and follow its answer, unless the reader scrolled up. The field is sticky and other
    // elements may follow below, so the end of this section is measured.
    const end = form.current.parentElement.getBoundingClientRect().bottom + scrollY;
    const isFollowed = seen.current.end - innerHeight - scrollY < 80 || turns.length > seen.current.turns;
    seen.current = { end, turns: turns.length };
    if (turns.length && isFollowed && end - innerHeight > scrollY) scrollTo(0, end - innerHeight);
  }, [turns]);
  const ask = () => {
    if (!text.trim() || isBusy) return;
    conversation.ask(text.trim());
    setText("");
    field.current.focus();
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    } else if (event.key === "Escape" && isBusy) conversation.stop();
  };
  return html`<form class="field-of-question" ref=${form} onSubmit=${(event) => {
    event.preventDefault();
    ask();
  }}>
    <label for="question">${isFirst || !goingOn.value ? (isChat ? "Ask the model" : "Ask this document") : "Ask a follow-up"}</label>
    <div class="composer">
      <textarea id="question" ref=${field} rows="1" value=${text} onKeyDown=${keys} aria-describedby=${`question-keys${service.looksUp ? " question-note" : ""}`}
        onInput=${(event) => setText(event.currentTarget.value)}></textarea>
      ${isBusy
        ? html`<button type="button" key="stop" onClick=${() => conversation.stop()}>Stop</button>`
        : html`<button type="submit" key="ask" class="main" disabled=${!text.trim()}>Ask</button>`}
    </div>
    <div class="quiet line"><span id="question-keys">Enter asks, Shift and Enter begins a line, Escape stops.</span>
      ${!isChat && html`<${SourceSwitch} />`}
      ${!isFirst && !service.looksUp && html`<label><input type="checkbox" checked=${goingOn.value}
        onChange=${(event) => goingOn.store.set(event.currentTarget.checked)} /> Remember this conversation</label>`}
      ${!isFirst && !isBusy && html`<button type="button" class="plain" onClick=${() => {
        conversation.clear();
        field.current.focus();
      }}>New conversation</button>`}</div>
    ${service.looksUp
      ? html`<p class="quiet" id="question-note">This small model only looks up single facts: What is the value of KEY?</p>`
      : html`<${Settings} />`}
  </form>`;
}

/** Copies to the clipboard. Returns whether it succeeded. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // without HTTPS there is no clipboard API
  }
}

function copyBySelection(text) {
  const before = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  before?.focus();
  return isDone;
}
