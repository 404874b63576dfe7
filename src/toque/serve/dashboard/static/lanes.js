// Box 1: the running batch as lanes, and the queue. A lane is a sequence: the part of its prompt that the cache had, what is
// computed, this step's chunk, what is left, its output.

import { $, count, duration, el, setText, shortId, waits } from "./format.js";

const PARTS = ["cached", "done", "chunk", "todo", "output"];

function split(lane) {
  const chunk = Math.min(lane.chunk_tokens || 0, lane.computed_tokens);
  const prompt = Math.min(lane.computed_tokens, lane.prompt_tokens);
  const decoding = lane.output_tokens > 0;
  const recent = decoding ? 0 : Math.min(chunk, prompt);
  const cached = Math.min(lane.cached_tokens, prompt);
  return {
    cached,
    done: Math.max(0, prompt - cached - recent),
    chunk: Math.min(recent, prompt - cached),
    todo: lane.prompt_tokens - prompt,
    output: lane.output_tokens,
  };
}

/** A prompt may be computed by one engine for another: then both have a lane for it. */
function key(lane) {
  return lane.engine === undefined ? lane.id : lane.engine + " " + lane.id;
}

export class Lanes {
  constructor(list, open) {
    this.list = list;
    this.open = open;
    this.rows = new Map();
  }

  show(lanes) {
    const longest = Math.max(1, ...lanes.map((lane) => lane.prompt_tokens + lane.output_tokens));
    const seen = new Set(lanes.map(key));
    for (const [id, row] of this.rows)
      if (!seen.has(id)) {
        row.item.remove();
        this.rows.delete(id);
      }
    lanes.forEach((lane, place) => {
      const row = this.rows.get(key(lane)) || this.make(lane);
      if (this.list.children[place] !== row.item) this.list.insertBefore(row.item, this.list.children[place] || null);
      this.fill(row, lane, longest);
    });
  }

  make(lane) {
    const parts = Object.fromEntries(PARTS.map((name) => [name, el("i", { class: name })]));
    const id = el("span", { class: "id" }, lane.engine === undefined ? null : el("b", {}, lane.engine + "·"), shortId(lane.id));
    const bar = el("span", { class: "bar", "aria-hidden": "true" }, ...Object.values(parts));
    const end = el("span", { class: "count" });
    const button = el("button", { type: "button", class: "lane", onclick: () => this.open(lane.id) }, id, bar, end);
    const row = { item: el("li", {}, button), parts, end, button };
    this.rows.set(key(lane), row);
    return row;
  }

  fill(row, lane, longest) {
    const sizes = split(lane);
    for (const name of PARTS) row.parts[name].style.flexBasis = (100 * sizes[name]) / longest + "%";
    this.say(row, lane);
  }

  say(row, lane) {
    const whole = lane.prompt_tokens - Math.min(lane.computed_tokens, lane.prompt_tokens);
    let text = count(lane.prompt_tokens) + " + " + count(lane.output_tokens);
    if (lane.output_tokens === 0) text = whole ? count(lane.computed_tokens) + " of " + count(lane.prompt_tokens) : count(lane.prompt_tokens);
    setText(row.end, text);
    const facts = [
      "request " + lane.id, lane.prompt_tokens + " prompt tokens", lane.cached_tokens + " of them cached",
      lane.output_tokens + " output tokens", lane.pages + " pages",
    ];
    if (lane.engine !== undefined) facts.splice(1, 0, "on engine " + lane.engine);
    if (lane.slo) facts.push("class " + lane.slo + (lane.slack_ms === null || lane.slack_ms === undefined ? "" : ", slack " + duration(lane.slack_ms)));
    row.button.title = facts.join("\n");
    row.button.setAttribute("aria-label", facts.join(", ") + ". Open its timeline");
  }
}

/** Waiting sequences: how long they are, and why nothing of them is computed. */
class Queue extends Lanes {
  make(lane) {
    const row = super.make(lane);
    const why = el("span", { class: "why" });
    row.button.replaceChildren(row.button.firstChild, el("span", {}, why), row.end);
    row.why = why;
    row.button.classList.add("waits");
    return row;
  }

  fill(row, lane) {
    this.say(row, lane);
    setText(row.why, waits(lane.waits));
    setText(row.end, count(lane.prompt_tokens) + " tok · " + duration(1e3 * lane.age_s));
  }
}

const SHADES = { rows: 1, pages: 0.85, budget: 0.7, behind: 0.5, shared_page: 0.6, slo: 0.9 };

export class Scheduler {
  constructor(open) {
    this.lanes = new Lanes($("lanes"), open);
    this.queue = new Queue($("queue"), open);
  }

  show(document_) {
    const board = document_.board, load = document_.load, model = document_.model;
    const lanes = document_.lanes || (board ? board.lanes : []);
    const running = lanes.filter((lane) => lane.row >= 0);
    const waiting = lanes.filter((lane) => lane.row < 0);
    this.lanes.show(running);
    this.queue.show(waiting);
    $("lanes-empty").hidden = running.length > 0 || load.running > 0;
    $("queue-empty").hidden = load.waiting > 0;
    const title = "Running batch · " + count(load.running) + (model ? " of " + model.max_num_seqs + " rows" : "");
    setText($("batch"), title);
    setText($("queue-title"), "Queue · " + count(load.waiting));
    const policy = model ? "policy " + model.scheduling_policy + ", up to " + count(model.max_num_batched_tokens) + " tokens a step" : "";
    setText($("policy"), policy);
    this.note(load, waiting.length);
    this.reasons(load);
    this.refusals(document_.totals);
  }

  note(load, shown) {
    const parts = [];
    if (load.waiting) {
      parts.push(count(load.waiting_tokens) + " tokens to compute");
      if (load.backlog_s) parts.push("about " + duration(1e3 * load.backlog_s));
      if (load.queue_age_s) parts.push("oldest " + duration(1e3 * load.queue_age_s));
      if (load.waiting > shown) parts.push("first " + shown + " shown");
    }
    setText($("queue-note"), parts.join(" · "));
  }

  reasons(load) {
    const stack = $("queue-reasons");
    const reasons = Object.entries(load.waiting_by_reason || {}).filter(([, n]) => n > 0);
    stack.replaceChildren(
      ...reasons.map(([reason, n]) => {
        const part = el("i", { title: n + " " + waits(reason) });
        part.style.flex = n + " 0 0";
        part.style.background = "var(--wait)";
        part.style.opacity = SHADES[reason] || 0.8;
        return part;
      }),
    );
    stack.setAttribute("aria-label", reasons.map(([reason, n]) => n + " " + waits(reason)).join(", ") || "nobody waits");
  }

  refusals(totals) {
    const names = { refused_queue_requests: "queue full", refused_queue_tokens: "too many tokens waiting",
      refused_queue_timeout: "waited too long", refused_slo: "class could not be kept", refused_invalid: "invalid" };
    const parts = Object.entries(names).filter(([name]) => totals[name]).map(([name, text]) => count(totals[name]) + " " + text);
    if (totals.downgraded) parts.push(count(totals.downgraded) + " downgraded");
    setText($("refusals"), parts.length ? "Refused since the start: " + parts.join(", ") + "." : "");
  }
}
