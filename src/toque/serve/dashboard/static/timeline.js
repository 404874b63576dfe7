// One request, from arrival to its end: what was computed when, and why it waited.

import { $, count, duration, el, svg, waits } from "./format.js";
import { withKey } from "./feed.js";

const KINDS = {
  queued: ["arrived at the engine", "wait"], wait: ["waited", "wait"], admitted: ["admitted", "held"], chunk: ["prompt chunk", "prompt"],
  decode: ["decoded", "output"], preempted: ["preempted", "bad"], first_token: ["first token", "output"], downgraded: ["downgraded", "bad"],
  fetched: ["pages came from another engine", "held"], engine_lost: ["its engine was lost", "bad"], finished: ["ended", "held"], more: ["more", "held"],
};
const REFRESH_MS = 1000;

export class Timeline {
  constructor() {
    this.dialog = $("timeline");
    $("t-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => clearTimeout(this.timer));
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  open(id) {
    this.id = id;
    $("t-body").replaceChildren(el("p", { class: "soft" }, "Loading…"));
    if (!this.dialog.open) this.dialog.showModal();
    this.load();
  }

  async load() {
    clearTimeout(this.timer);
    const id = this.id;
    try {
      const response = await fetch("/v1/requests/" + encodeURIComponent(id) + "/timeline", { headers: withKey() });
      const body = await response.json();
      if (id !== this.id || !this.dialog.open) return;
      if (!response.ok) throw new Error(body.error.message);
      this.show(body);
      if (body.sequences.some((sequence) => sequence.state === "open")) this.timer = setTimeout(() => this.load(), REFRESH_MS);
    } catch (error) {
      const text = error instanceof TypeError ? "The server does not answer." : error.message;
      $("t-body").replaceChildren(el("p", { class: "wrong" }, text));
    }
  }

  show(body) {
    $("t-title").textContent = "Timeline of " + body.id;
    const chosen = body.sequences.filter((sequence) => sequence.id === this.id);
    const shown = chosen.length ? chosen : body.sequences;
    $("t-body").replaceChildren(...shown.flatMap((sequence) => part(sequence, shown.length > 1)));
  }
}

function part(sequence, titled) {
  const title = titled ? [el("h3", {}, "Choice " + sequence.choice)] : [];
  return [...title, facts(sequence), gantt(sequence), list(sequence)];
}

function facts(sequence) {
  const slo = sequence.slo;
  const rows = [
    ["ended", sequence.state === "open" ? "still open" : sequence.finish_reason + (sequence.error ? ": " + sequence.error : "")],
    ["prompt", count(sequence.prompt_tokens) + " tokens"],
    ["found in the cache", sequence.cached_tokens === null ? "–" : count(sequence.cached_tokens) + " tokens"],
    ["output", sequence.completion_tokens === undefined ? "–" : count(sequence.completion_tokens) + " tokens"],
    ["first token after", duration(sequence.ttft_ms)],
    ["total", duration(sequence.total_ms)],
  ];
  for (const [part, ms] of Object.entries(sequence.handover_ms || {})) rows.push([part.replaceAll("_", " "), duration(ms)]);
  for (const [reason, ms] of Object.entries(sequence.waited_ms)) rows.push([waits(reason).replace("waits", "waited"), duration(ms)]);
  if (slo) rows.push(["class " + slo.class, slo.verdict ? slo.verdict + (slo.missed.length ? " (" + slo.missed.join(", ") + ")" : "") : "open"]);
  return el("dl", { class: "facts-row" }, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function gantt(sequence) {
  const width = Math.max(240, $("t-body").clientWidth), height = 74, left = 4, right = width - 4, top = 16, tall = 30;
  const ends = sequence.events.map((event) => event.until_ms ?? event.at_ms);
  const last = Math.max(1, sequence.total_ms ?? 0, ...ends);
  const x = (ms) => left + ((right - left) * Math.max(0, ms)) / last;
  const label = sequence.events.length ? "From arrival to " + duration(last) + ": the list below says the same" : "The engine has told nothing yet";
  const target = svg("svg", { class: "gantt", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  target.append(svg("line", { class: "axis", x1: left, x2: right, y1: top + tall + 3, y2: top + tall + 3 }));
  for (const event of sequence.events) {
    const until = event.until_ms ?? event.at_ms;
    if (["wait", "chunk", "decode", "preempted"].includes(event.kind)) {
      const rect = svg("rect", { class: "g-" + event.kind, x: x(event.at_ms), y: top, width: Math.max(1.5, x(until) - x(event.at_ms)), height: tall, rx: 2 });
      rect.append(svg("title"));
      rect.firstChild.textContent = describe(event);
      target.append(rect);
    } else if (event.kind === "first_token") {
      target.append(svg("line", { class: "g-mark", x1: x(event.at_ms), x2: x(event.at_ms), y1: top - 6, y2: top + tall + 3 }));
      const text = svg("text", { x: Math.min(x(event.at_ms) + 4, right - 70), y: 11 });
      text.textContent = "first token";
      target.append(text);
    }
  }
  for (const share of width < 500 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) {
    const text = svg("text", { x: x(share * last), y: height - 8, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" });
    text.textContent = duration(share * last);
    target.append(text);
  }
  return target;
}

function describe(event) {
  const [name] = KINDS[event.kind] || [event.kind];
  const parts = [];
  if (event.kind === "wait") parts.push(waits(event.reason).replace("waits ", ""));
  else if (event.kind === "admitted") parts.push(event.tokens ? count(event.tokens) + " tokens found in the cache" : "nothing found in the cache");
  else if (event.kind === "preempted") parts.push(count(event.tokens || 0) + " tokens had been computed");
  else if (event.tokens) parts.push(count(event.tokens) + " tokens");
  if (event.steps > 1) parts.push(count(event.steps) + " steps");
  if (event.reason && event.kind !== "wait") parts.push(event.reason);
  for (const what of ["missing", "corrupt", "stale", "late", "lost"]) if (event[what + "_pages"]) parts.push(count(event[what + "_pages"]) + " pages " + what);
  if (event.engine !== undefined) parts.push("engine " + event.engine);
  const took = (event.until_ms ?? event.at_ms) - event.at_ms;
  const lasted = took < 0.05 ? "" : " (" + duration(took) + ")";
  return name + (parts.length ? ": " + parts.join(", ") : "") + lasted;
}

function list(sequence) {
  if (!sequence.events.length) return el("p", { class: "empty" }, "The engine is in a long step, or this request ended before the engine took it.");
  const rows = sequence.events.map((event) => {
    const [, paint] = KINDS[event.kind] || ["", "held"];
    return el("tr", {}, el("td", { class: "n mono" }, duration(event.at_ms)), el("td", { class: "k-" + paint }, el("span", { class: "dot" })), el("td", {}, describe(event)));
  });
  return el("div", { class: "scroll" }, el("table", { class: "events" }, el("tbody", {}, ...rows)));
}
