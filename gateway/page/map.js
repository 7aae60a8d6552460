// The memory of the ranks, the placement of the open document, and the recovery of lost ranks.
import { useNow } from "./clock.js";
import { contexts, titleOf } from "./contexts.js";
import { ago, bytes, clock, count, duration, percent, tokens } from "./format.js";
import { html } from "./html.js";
import { opened } from "./route.js";
import { service } from "./service.js";
import { useStore } from "./store.js";

const SHOWN_LOSSES = 4;

export function Map() {
  const { cluster } = useStore(service.store);
  useStore(contexts.store);
  const context = contexts.find(useStore(opened));
  return html`<aside class="map" aria-label="Memory">
    <h2>Memory</h2>
    ${cluster === null
      ? html`<p class="quiet">Not connected.</p>`
      : html`<${Healing} cluster=${cluster} />
        <${Legend} context=${context} />
        ${[...nodesOf(cluster)].map(([node, workers]) => html`<${Node} key=${node} ...${{ node, workers, context }} />`)}
        <${Load} cluster=${cluster} />
        <${Losses} losses=${cluster.losses} />`}
  </aside>`;
}

/** Ranks by their nodes, both in the order of ranks. */
function nodesOf({ workers }) {
  const nodes = new globalThis.Map();
  for (const worker of [...workers].sort((a, b) => a.rank - b.rank)) {
    nodes.set(worker.node, [...(nodes.get(worker.node) ?? []), worker]);
  }
  return nodes;
}

function Legend({ context }) {
  if (!context) return null;
  if (!context.shares?.length) return html`<p class="quiet">The placement is visible only to operators.</p>`;
  return html`<p class="legend"><span><i class="own"></i>${titleOf(context)}</span><span><i class="others"></i>other documents</span></p>`;
}

function Node({ node, workers, context }) {
  return html`<section class="node" aria-label="Node ${node}">
    <h3>${node}</h3>
    <ul>${workers.map((worker) => html`<${Rank} key=${worker.rank} ...${{ worker, context }} />`)}</ul>
  </section>`;
}

function Rank({ worker, context }) {
  const { rank, device, tokens: held, max_tokens: room, kv_bytes: size, max_kv_bytes: most } = worker;
  const share = context?.shares?.find((each) => each.rank === rank);
  const own = Math.min(share?.tokens ?? 0, held);
  const width = (part) => ({ width: `${room ? (100 * part) / room : 0}%` });
  return html`<li>
    <p class="line"><span>Rank ${rank} <span class="quiet">${device}</span></span><span>${percent(held, room)} full</span></p>
    <div class="bar" role="img" aria-label="${percent(held, room)} of ${tokens(room)}" title="${bytes(size)} of ${bytes(most)}">
      <span class="own" style=${width(own)}></span>
      <span class="others" style=${width(held - own)}></span>
    </div>
    <p class="numbers">
      <span>${count(held)} of ${tokens(room)}</span>
      ${share && html`<span><b>${count(share.tokens)}</b> of this document, ${percent(share.tokens, context.tokens)}</span>`}
    </p>
  </li>`;
}

/** The progress of a recovery. */
function Healing({ cluster: { recovery, world_size: ranks, losses } }) {
  if (!recovery || recovery.over) return null;
  const { lost_tokens: lost, recovered_tokens: back, seconds } = recovery;
  const last = losses.at(-1);
  return html`<div class="card healing" role="status">
    <p><b>${last ? `${rankName(last)} was lost.` : "A rank was lost."}</b> ${lost > 0
      ? "Its part of the documents is being restored. Only questions about this part wait."
      : "No document is affected."}</p>
    ${lost > 0 && html`<div class="bar" role="progressbar" aria-label="Restored" aria-valuemin="0" aria-valuemax="100"
      aria-valuenow=${Math.floor((100 * back) / lost)}><span class="read" style=${{ width: `${(100 * back) / lost}%` }}></span></div>
    <p class="numbers"><span>${count(back)} of ${tokens(lost)} restored</span><span>${duration(seconds)}</span>
      <span>${ranks} ${ranks === 1 ? "rank" : "ranks"} running</span></p>`}
  </div>`;
}

function Load({ cluster: { running, waiting, model, exact } }) {
  return html`<p class="numbers">
    <span>${running ? `${count(running)} running` : "idle"}</span>
    ${waiting > 0 && html`<span>${count(waiting)} waiting</span>`}
    <span>${model.name}${model.dtype ? `, ${model.dtype}` : ""}</span>
    ${exact === false && html`<span>answers are not exact</span>`}
  </p>`;
}

function Losses({ losses }) {
  const now = useNow();
  if (!losses.length) return null;
  return html`<details><summary>${losses.length === 1 ? "One rank was lost" : `${losses.length} ranks were lost`}, last
      ${" "}${ago(losses.at(-1).time, now)}</summary>
    <ul class="losses">${losses.slice(-SHOWN_LOSSES).reverse().map((loss) => html`<li key=${`${loss.member}-${loss.time}`}>
      ${clock(loss.time)}: ${rankName(loss)} on ${loss.node} ${loss.reason}. ${SLOTS[loss.slot] ?? ""}
    </li>`)}</ul>
  </details>`;
}

const SLOTS = {
  waiting: "A replacement will be started.",
  filling: "A replacement is starting.",
  filled: "A replacement is running.",
  given_up: "There is no replacement.",
};

const rankName = ({ rank, member }) => (rank === null || rank === undefined ? `Member ${member}` : `Rank ${rank}`);
