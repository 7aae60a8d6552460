// The sources of an answer: numbered marks under it, which open the text of the document at that place.
import { contextText } from "./api.js";
import { contexts } from "./contexts.js";
import { Dialog } from "./dialog.js";
import { sentence } from "./errors.js";
import { percent, tokens } from "./format.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { around, divide } from "./passage.js";

// Tokens of the document before and after a source, and with each further step.
const STEP = 300;

export function Sources({ id, sources }) {
  const [opened, setOpened] = useState(null);
  if (!sources.length) return html`<p class="quiet">No part of the document stands out as a source.</p>`;
  const close = () => setOpened(null);
  return html`<div class="sources" role="group" aria-label="Sources of this answer">
    <p class="quiet">Sources, with the share of the answer's attention. A share does not prove that the answer is right.</p>
    <ol>
      ${sources.map((source, index) => html`<li key=${index}>
        <button type="button" aria-haspopup="dialog" aria-label=${`Source ${index + 1}: ${source.label}, ${percent(source.share, 1)} of the attention`}
          onClick=${() => setOpened(index)}><b>${index + 1}</b> ${source.label} <span>${percent(source.share, 1)}</span></button>
      </li>`)}
    </ol>
    ${opened !== null && html`<${Passage} ...${{ id, close }} source=${sources[opened]} number=${opened + 1} />`}
  </div>`;
}

/** The text of the document with the source marked. */
function Passage({ id, source, number, close }) {
  const [before, setBefore] = useState(STEP);
  const [after, setAfter] = useState(STEP);
  const [{ found, error }, setRead] = useState({});
  const mark = useRef(null);
  const numTokens = contexts.find(id)?.tokens ?? source.tokens[1];
  const [start, end] = around(source.tokens, before, after, numTokens);
  useEffect(() => {
    const abort = new AbortController();
    contextText(id, start, end, abort.signal)
      .then((text) => setRead({ found: text }))
      .catch((caught) => abort.signal.aborted || setRead({ found, error: caught }));
    return () => abort.abort();
  }, [id, start, end]);
  useLayoutEffect(() => mark.current?.scrollIntoView({ block: "center" }), [!found]);
  const parts = found && divide(found, source);
  return html`<${Dialog} title=${`Source ${number}: ${source.label}`} onClose=${close}>
    <p class="numbers"><span>${percent(source.share, 1)} of the answer's attention</span>
      <span>${tokens(source.tokens[1] - source.tokens[0])}</span></p>
    <div class="choices near"><button type="button" disabled=${!start} onClick=${() => setBefore(before + STEP)}>Earlier text</button></div>
    <div class="passage" tabindex="0" role="region" aria-label="Text of the document" aria-busy=${!found && !error}>
      ${parts ? html`${parts.before}<mark ref=${mark}>${parts.source}</mark>${parts.after}` : error ? "" : "Reading…"}
    </div>
    ${error && html`<p class="error" role="alert">${sentence(error)}</p>`}
    <div class="choices near"><button type="button" disabled=${end >= numTokens} onClick=${() => setAfter(after + STEP)}>Later text</button></div>
    <div class="choices"><button type="button" class="main" autofocus onClick=${close}>Close</button></div>
  <//>`;
}
