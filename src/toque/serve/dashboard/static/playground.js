// Box 3: a conversation over /v1/chat/completions, streamed as any client would.

import { $, count, duration, el, rate } from "./format.js";
import { events, withKey } from "./feed.js";

export class Playground {
  constructor(openTimeline, askForKey) {
    this.messages = [];
    this.openTimeline = openTimeline;
    this.askForKey = askForKey;
    this.abort = null;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("stop").addEventListener("click", () => this.abort?.abort());
    $("clear").addEventListener("click", () => this.clear());
  }

  classes(slos) {
    const names = slos.map((slo) => slo.name).join();
    if (names === this.names) return;
    this.names = names;
    $("slo-choice").hidden = !slos.length;
    $("p-slo").replaceChildren(el("option", { value: "" }, "default"), ...slos.map((slo) => el("option", { value: slo.name }, slo.name)));
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    $("chat").replaceChildren();
    $("chat-empty").hidden = false;
    $("message").focus();
  }

  body() {
    const number = (id) => ($("p-" + id).value === "" ? undefined : Number($("p-" + id).value));
    const system = $("p-system").value.trim();
    return {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
      slo: $("p-slo").value || undefined, stream: true, stream_options: { include_usage: true },
    };
  }

  async send() {
    const text = $("message").value.trim();
    if (!text || this.abort) return;
    this.messages.push({ role: "user", content: text });
    $("message").value = "";
    $("chat-empty").hidden = true;
    this.turn("user", text);
    const turn = this.turn("assistant", "");
    turn.node.classList.add("live");
    this.busy(true);
    const answer = { text: "", began: performance.now(), first: null, id: "", usage: null, reason: null };
    try {
      await this.stream(answer, turn);
    } catch (error) {
      if (error.name === "AbortError") answer.reason = "stopped";
      else this.failed(turn, answer, error);
    }
    turn.node.classList.remove("live");
    if (answer.text) this.messages.push({ role: "assistant", content: answer.text });
    else if (!answer.reason || answer.reason === "stopped") this.messages.pop();
    if (answer.reason) this.facts(turn, answer);
    this.busy(false);
  }

  async stream(answer, turn) {
    this.abort = new AbortController();
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: withKey({ "content-type": "application/json" }), body: JSON.stringify(this.body()), signal: this.abort.signal,
    });
    if (!response.ok) {
      const wrong = (await response.json()).error;
      const again = response.headers.get("retry-after");
      if (response.status === 401) this.askForKey(wrong.message);
      throw new Error(wrong.message + (again ? ` (try again in ${again} s)` : ""));
    }
    for await (const text of events(response)) {
      if (text === "[DONE]") return;
      const chunk = JSON.parse(text);
      if (chunk.error) throw new Error(chunk.error.message);
      answer.id = chunk.id;
      answer.usage = chunk.usage || answer.usage;
      for (const choice of chunk.choices) {
        answer.first ??= performance.now();
        answer.reason = choice.finish_reason || answer.reason;
        if (choice.delta.reasoning) turn.thought.textContent += choice.delta.reasoning;
        this.add(turn, answer, choice.delta.content || "");
      }
    }
  }

  add(turn, answer, text) {
    const chat = $("chat");
    const atEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 40;
    answer.text += text;
    turn.text.textContent = answer.text;
    if (atEnd) chat.scrollTop = chat.scrollHeight;
  }

  turn(role, text) {
    const body = el("span", { class: "text" }, text);
    const thought = el("span", { class: "thought" });
    const node = el("li", { class: "turn " + role }, el("span", { class: "hidden" }, role === "user" ? "You: " : "Model: "), thought, body);
    $("chat").append(node);
    $("chat").scrollTop = $("chat").scrollHeight;
    return { node, text: body, thought };
  }

  failed(turn, answer, error) {
    if (!answer.text) {
      turn.node.remove();
      this.messages.pop();
    }
    const text = error instanceof TypeError ? "The server does not answer." : error.message;
    this.turn("failed", text).node.setAttribute("role", "alert");
  }

  facts(turn, answer) {
    const took = performance.now() - (answer.first ?? answer.began);
    const tokens = answer.usage?.completion_tokens;
    const parts = [answer.reason, answer.first && "first token " + duration(answer.first - answer.began)];
    if (tokens) parts.push(count(tokens) + " tokens", tokens > 1 ? rate((1e3 * (tokens - 1)) / took) + " tok/s" : null);
    const cached = answer.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(count(cached) + " of " + count(answer.usage.prompt_tokens) + " prompt tokens cached");
    const line = el("span", { class: "facts" }, parts.filter(Boolean).join(" · ") + (answer.id ? " · " : ""));
    if (answer.id) line.append(el("button", { type: "button", onclick: () => this.openTimeline(answer.id) }, "timeline"));
    turn.node.append(line);
    $("chat").scrollTop = $("chat").scrollHeight;
  }

  busy(yes) {
    if (!yes) this.abort = null;
    $("send").disabled = yes;
    $("stop").hidden = !yes;
  }
}
