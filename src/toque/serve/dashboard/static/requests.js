// The latest requests, each a way to its timeline.

import { $, count, duration, el, shortId } from "./format.js";

const MOST = 16;

export class Requests {
  constructor(open) {
    this.open = open;
    this.rows = new Map();
  }

  show(calls) {
    $("requests-empty").hidden = calls.length > 0;
    $("requests-table").hidden = !calls.length;
    const body = $("requests");
    const seen = new Set(calls.slice(0, MOST).map((call) => call.id));
    for (const [id, row] of this.rows) if (!seen.has(id)) { row.node.remove(); this.rows.delete(id); }
    calls.slice(0, MOST).forEach((call, place) => {
      const row = this.rows.get(call.id) || this.make(call);
      const said = JSON.stringify(call);
      if (row.said !== said) this.fill(row, call, said);
      if (body.children[place] !== row.node) body.insertBefore(row.node, body.children[place] || null);
    });
  }

  make(call) {
    const button = el("button", { type: "button", title: call.id, "aria-label": "Timeline of " + call.id, onclick: () => this.open(call.id) }, shortId(call.id));
    const cells = Array.from({ length: 7 }, (_, place) => el("td", { class: place > 0 && place < 6 ? "n" : "" }));
    const row = { node: el("tr", {}, el("td", {}, button), ...cells), cells, said: "" };
    this.rows.set(call.id, row);
    return row;
  }

  fill(row, call, said) {
    row.said = said;
    const [ended, prompt, cached, output, first, total, slo] = row.cells;
    const bad = call.refused || call.reason === "error";
    ended.replaceChildren(el("span", { class: "tag " + (call.ended ? (bad ? "bad" : "") : "live") }, call.ended ? call.reason : "open"));
    prompt.textContent = count(call.prompt);
    cached.textContent = count(call.cached);
    output.textContent = count(call.output);
    first.textContent = duration(call.ttft_ms);
    total.textContent = duration(call.total_ms);
    slo.replaceChildren(call.slo ? el("span", { class: "tag " + (call.slo.verdict === "met" ? "good" : call.slo.verdict && call.slo.verdict !== "left" ? "bad" : "") },
      call.slo.class + (call.slo.verdict ? " " + call.slo.verdict : "")) : "–");
  }
}
