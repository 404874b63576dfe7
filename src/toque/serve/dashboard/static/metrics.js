// Box 4: latency and throughput over the last minutes, promises kept, what was lost. And the tiles at the top.

import { $, count, duration, el, rate, share } from "./format.js";
import { Chart, WINDOW_S } from "./charts.js";

const at = (name, place) => (second) => (second[name] ? second[name][place] : null);
const VERDICTS = { met: "good", missed: "bad", refused: "wait", failed: "bad" };

export class Metrics {
  constructor() {
    this.seconds = new Map();
    this.charts = {
      tokens: new Chart($("c-tokens"), $("v-tokens"), [
        { name: "prompt", colour: "prompt", value: (s) => s.prompt, area: true },
        { name: "output", colour: "output", value: (s) => s.output, area: true },
      ], "count"),
      ttft: new Chart($("c-ttft"), $("v-ttft"), [
        { name: "p95", colour: "prompt", value: at("ttft", 1), faint: true },
        { name: "p50", colour: "prompt", value: at("ttft", 0) },
      ], "ms"),
      itl: new Chart($("c-itl"), $("v-itl"), [
        { name: "p99", colour: "output", value: at("itl", 2), faint: true },
        { name: "p50", colour: "output", value: at("itl", 0) },
      ], "ms"),
      load: new Chart($("c-load"), $("v-load"), [
        { name: "running", colour: "output", value: (s) => s.running, area: true },
        { name: "waiting", colour: "wait", value: (s) => s.waiting, area: true },
      ], "count"),
    };
  }

  show(document_) {
    for (const second of document_.seconds) this.seconds.set(second.t, second);
    for (const t of this.seconds.keys()) if (t < document_.now - WINDOW_S - 5) this.seconds.delete(t);
    const seconds = [...this.seconds.values()].sort((a, b) => a.t - b.t);
    this.draw(seconds, document_);
    this.tiles(seconds, document_);
    this.promises(document_.slo);
    this.losses(document_);
  }

  draw(seconds, document_) {
    const targets = (name) => document_.slo.filter((slo) => slo[name]).map((slo) => ({ name: slo.name, value: 1e3 * slo[name] }));
    const now = Math.floor(document_.now);
    this.charts.tokens.show(seconds, now);
    this.charts.load.show(seconds, now);
    this.charts.ttft.show(seconds, now, targets("ttft_s"));
    this.charts.itl.show(seconds, now, targets("itl_s"));
  }

  tiles(seconds, document_) {
    const recent = seconds.filter((second) => second.t > document_.now - 6);
    const per = (name) => recent.reduce((sum, second) => sum + second[name], 0) / 5;
    const last = (name) => [...seconds].reverse().find((second) => second[name])?.[name] ?? null;
    const { load, totals, errors } = document_;
    const lost = Object.values(errors).reduce((sum, n) => sum + n, 0);
    const ttft = last("ttft"), itl = last("itl");
    tile("Output", rate(per("output")), "tok/s", count(totals.generation_tokens) + " so far");
    tile("Prompts", rate(per("prompt")), "tok/s", count(totals.prompt_tokens) + " so far");
    tile("Running", count(load.running), "", load.waiting ? count(load.waiting) + " waiting" : "nobody waits");
    tile("First token", duration(ttft && ttft[0]), "", ttft ? "p95 " + duration(ttft[1]) : "no request yet");
    tile("Between tokens", duration(itl && itl[0]), "", itl ? "p99 " + duration(itl[2]) : "no stream yet");
    const hits = totals.prefix_queries ? totals.prefix_hits / totals.prefix_queries : null;
    tile("Cache hits", share(hits), "", count(totals.prefix_hits) + " spared");
    tile("KV held", share(load.total_pages ? load.held_pages / load.total_pages : 0), "", count(load.free_pages) + " pages free");
    tile("Errors", count(lost), "", lost ? "see what was lost" : "none");
  }

  promises(slos) {
    $("slos-empty").hidden = slos.length > 0;
    $("slos").replaceChildren(...slos.map(promise));
  }

  losses(document_) {
    const { errors, wasted, ended, totals } = document_;
    const rows = [["preemptions", totals.preemptions || 0, false]];
    for (const [cause, n] of Object.entries(wasted)) rows.push(["tokens " + cause, n, false]);
    for (const [cause, n] of Object.entries(errors)) rows.push(["calls: " + cause.replace("_", " "), n, cause !== "cancelled"]);
    if (ended.error) rows.push(["sequences failed", ended.error, true]);
    $("losses").replaceChildren(
      ...rows.map(([name, n, bad]) => el("div", {}, el("dt", {}, name), el("dd", { class: n && bad ? "some" : "" }, count(n)))),
    );
  }
}

const tilesByName = new Map();

function tile(name, value, unit, more) {
  if (!tilesByName.has(name)) {
    const parts = { value: document.createTextNode(""), unit: el("small"), more: el("div", { class: "more" }) };
    $("tiles").append(el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }, parts.value, parts.unit), parts.more));
    tilesByName.set(name, parts);
  }
  const parts = tilesByName.get(name);
  if (parts.value.data !== value) parts.value.data = value;
  if (parts.unit.textContent !== unit) parts.unit.textContent = unit;
  if (parts.more.textContent !== more) parts.more.textContent = more;
}

function promise(slo) {
  const targets = [
    slo.ttft_s && "first token ≤ " + duration(1e3 * slo.ttft_s),
    slo.itl_s && "between tokens ≤ " + duration(1e3 * slo.itl_s),
    slo.deadline_s && "done within " + duration(1e3 * slo.deadline_s),
  ].filter(Boolean);
  const counts = Object.entries(VERDICTS).map(([word, paint]) => [word, slo.verdicts[word] || 0, paint]);
  const stack = el("div", { class: "stack", role: "img", "aria-label": counts.map(([word, n]) => n + " " + word).join(", ") });
  for (const [word, n, paint] of counts) {
    if (!n) continue;
    const part = el("i", { title: n + " " + word });
    part.style.flex = n + " 0 0";
    part.style.background = `var(--${paint})`;
    if (word === "failed") part.style.opacity = 0.6;
    stack.append(part);
  }
  const said = counts.filter(([, n]) => n).map(([word, n]) => count(n) + " " + word).join(" · ");
  const ratio = slo.ratio === null ? "nothing lately" : share(slo.ratio) + " kept";
  return el("li", { class: "slo" },
    el("span", {}, el("b", {}, slo.name), " ", el("span", { class: "soft" }, targets.join(", "))),
    el("span", { class: "share" }, ratio), stack, el("span", { class: "soft" }, said || "no request of this class yet"));
}
