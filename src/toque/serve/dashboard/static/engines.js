// Several engines: a card for each with its role, life, load and pages; which one boxes 1 and 2 look into; what travelled.

import { $, amount, count, duration, el, setText, share } from "./format.js";

const STATES = { alive: "ready", starting: "soon", lost: "bad" };
const PAGES = ["held", "cached", "free"];

function life(engine) {
  return engine.alive ? "alive" : engine.starting ? "starting" : "lost";
}

export class Engines {
  /** `chosen()` is called when another engine is looked into. */
  constructor(chosen) {
    this.index = 0;
    this.cards = new Map();
    $("engines").addEventListener("change", (event) => {
      this.index = +event.target.value;
      chosen();
    });
  }

  /** The document as boxes 1 and 2 are to see it: lanes of all engines, pages and tree of the chosen one. */
  view(document_) {
    const { boards, fleet } = document_;
    if (!fleet) return { ...document_, board: boards[0] || null, several: false };
    const engine = fleet.engines.find((one) => one.index === this.index) || fleet.engines[0];
    const lanes = Object.entries(boards).flatMap(([index, board]) => board.lanes.map((lane) => ({ ...lane, engine: +index })));
    return { ...document_, several: true, lanes, board: boards[engine.index] || null, engine: { ...engine, life: life(engine) } };
  }

  show(document_) {
    const { fleet } = document_;
    $("fleet").hidden = !fleet;
    if (!fleet) return;
    const up = fleet.engines.filter((engine) => engine.alive).length;
    setText($("fleet-note"), up + " of " + fleet.engines.length + " alive");
    for (const engine of fleet.engines) this.fill(this.cards.get(engine.index) || this.make(engine), engine);
    this.transfers(fleet);
  }

  make(engine) {
    const input = el("input", { type: "radio", name: "engine", value: engine.index, class: "hidden" });
    input.checked = engine.index === this.index;
    const card = { input, pill: el("span", { class: "pill" }), facts: el("span", { class: "soft" }), pages: el("span", { class: "soft" }), parts: {} };
    for (const name of PAGES) card.parts[name] = el("i", { class: "p-" + name });
    const bar = el("span", { class: "stack", "aria-hidden": "true" }, ...PAGES.map((name) => card.parts[name]));
    const head = el("span", { class: "head" }, el("b", {}, "engine " + engine.index), el("span", { class: "soft" }, engine.role), card.pill);
    $("engines").append(el("label", { class: "engine" }, input, head, card.facts, bar, card.pages));
    this.cards.set(engine.index, card);
    return card;
  }

  fill(card, engine) {
    const { load } = engine, state = life(engine);
    setText(card.pill, state);
    card.pill.dataset.state = STATES[state];
    const parts = [count(engine.open_requests) + (engine.open_requests === 1 ? " open request" : " open requests")];
    parts.push(engine.restarts ? count(engine.restarts) + (engine.restarts === 1 ? " restart" : " restarts") : "no restart");
    setText(card.facts, parts.join(" · "));
    for (const name of PAGES) card.parts[name].style.flex = (engine.alive ? load[name + "_pages"] : 0) + " 0 0";
    const held = load.total_pages ? load.held_pages / load.total_pages : 0;
    setText(card.pages, engine.alive ? share(held) + " of " + count(load.total_pages) + " pages held · " + count(load.cached_pages) + " cached" : "no pages");
  }

  transfers(fleet) {
    const t = fleet.transfers;
    const handed = fleet.engines.some((engine) => engine.role === "prefill");
    const rows = [["requests moved", count(t.moves), 0]];
    if (handed) {
      rows.push(["pages moved", count(t.moved_pages), 0], ["bytes moved", amount(t.moved_bytes), 0]);
      rows.push(["hand-overs", count(t.fetches), 0], ["time of one", duration(t.fetches ? (1e3 * t.seconds) / t.fetches : null), 0]);
      rows.push(["time of all", duration(1e3 * t.seconds), 0], ["pages there already", count(t.cached_pages), 0]);
      rows.push(["verification failures", count(t.failed.corrupt || 0), t.failed.corrupt], failures(t.failed));
      rows.push(["pages recomputed", count(t.missing_pages), 0]);
      rows.push(...leases(fleet.engines));
    }
    $("transfers").replaceChildren(
      ...rows.map(([name, value, bad]) => el("div", {}, el("dt", {}, name), el("dd", { class: bad ? "some" : "" }, value))),
    );
  }
}

/** Prompts whose pages an engine keeps for another one that has not taken them all yet. */
function leases(engines) {
  const rows = [];
  for (const { index, role, kept } of engines) {
    if (role === "decode" && !kept.leases) continue;
    rows.push(["leases · engine " + index, count(kept.leases), 0], ["oldest lease · engine " + index, duration(1e3 * kept.oldest_lease_s), 0]);
    rows.push(["leases expired · engine " + index, count(kept.expired), kept.expired]);
  }
  return rows;
}

/** Pages that were asked for and not used, by reason. */
function failures(failed) {
  const total = Object.values(failed).reduce((sum, pages) => sum + pages, 0);
  const reasons = Object.entries(failed).filter(([, pages]) => pages).map(([reason, pages]) => count(pages) + " " + reason);
  return ["pages not used", reasons.join(", ") || "0", total];
}
