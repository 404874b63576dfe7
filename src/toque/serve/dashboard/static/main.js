// Wires the boxes to the feed; owns the theme, the key, and what is said about the connection.

import { $, setText } from "./format.js";
import { Feed, storeKey } from "./feed.js";
import { drawSteps } from "./charts.js";
import { Engines } from "./engines.js";
import { Scheduler } from "./lanes.js";
import { Memory } from "./memory.js";
import { Metrics } from "./metrics.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { Timeline } from "./timeline.js";

// ------------------------------------------------------------------------------------------------ theme

const THEMES = ["system", "light", "dark"];
const GLYPHS = { system: "◐", light: "☀", dark: "☾" };
const dark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const chosen = localStorage.getItem("toque-theme") || "system";
  document.documentElement.dataset.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
  $("theme").textContent = GLYPHS[chosen];
  $("theme").setAttribute("aria-label", "Theme: " + (chosen === "system" ? "as the system" : chosen));
  if (latest) show(latest);
}

// ------------------------------------------------------------------------------------------------ boxes

let latest = null;
const timeline = new Timeline();
const openTimeline = (id) => timeline.open(id);
const engines = new Engines(() => show(latest));
const scheduler = new Scheduler(openTimeline);
const memory = new Memory();
const metrics = new Metrics();
const requests = new Requests(openTimeline);
const playground = new Playground(openTimeline, (why) => askForKey(why));
const steps = new Map();

const SAID = { ready: "ready", loading: "loading the model", shutting_down: "stopping", engine_gone: "engine gone", engine_stuck: "engine stuck" };

function show(document_) {
  latest = document_;
  document.body.classList.remove("stale");
  const good = document_.state === "ready";
  const soon = document_.state === "loading" || document_.state === "shutting_down";
  setState(good ? "ready" : soon ? "soon" : "bad", SAID[document_.state] || document_.state);
  setBanner(good || document_.state === "loading" ? "" : document_.reason);
  const model = document_.model;
  setText($("model"), model ? model.name + " · " + model.fingerprint : "no model yet");
  document.title = (model ? model.name + " · " : "") + "toque";
  engines.show(document_);
  const view = engines.view(document_);
  scheduler.show(view);
  showSteps(document_.steps);
  memory.show(view);
  metrics.show(document_);
  requests.show(document_.calls);
  playground.classes(document_.slo);
}

function showSteps(latestSteps) {
  const last = latestSteps.length ? latestSteps[latestSteps.length - 1][0] : 0;
  for (const number of steps.keys()) if (number > last) steps.clear(); // the server was started anew
  for (const step of latestSteps) steps.set(step[0], step);
  while (steps.size > 400) steps.delete(steps.keys().next().value);
  const all = [...steps.values()];
  $("steps").hidden = !all.length;
  drawSteps($("steps"), all);
  const step = all[all.length - 1];
  setText($("steps-note"), step ? `the last one took ${step[1].toFixed(1)} ms for ${step[2] + step[3]} tokens of ${step[4]} sequences` : "none yet");
}

function setState(state, text) {
  $("state").dataset.state = state;
  setText($("state"), text);
}

function setBanner(text) {
  $("banner").hidden = !text;
  setText($("banner"), text);
}

// ------------------------------------------------------------------------------------------------ feed and key

let keyTried = false;

const feed = new Feed({
  document: show,
  lost(reason) {
    setState("bad", "disconnected");
    document.body.classList.add("stale");
    const since = latest ? " What you see is from " + new Date(1e3 * latest.now).toLocaleTimeString() + "." : "";
    setBanner("Disconnected: " + reason + ". Trying again." + since);
  },
  denied(status, message) {
    setState("bad", status === 401 ? "key needed" : "not allowed");
    askForKey(status === 403 ? message : keyTried ? "The server does not know this key." : "");
  },
});

function askForKey(why = "") {
  $("key").hidden = false;
  $("k-wrong").hidden = !why;
  $("k-wrong").textContent = why;
  if (!$("ask-key").open) $("ask-key").showModal();
  $("k-input").focus();
}

$("key").addEventListener("click", () => askForKey());
$("key-form").addEventListener("submit", () => {
  storeKey($("k-input").value.trim());
  $("k-input").value = "";
  keyTried = true;
  feed.restart();
});

$("theme").addEventListener("click", () => {
  const chosen = localStorage.getItem("toque-theme") || "system";
  localStorage.setItem("toque-theme", THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length]);
  applyTheme();
});
dark.addEventListener("change", applyTheme);
addEventListener("resize", () => latest && drawSteps($("steps"), [...steps.values()]));
applyTheme();
feed.start();
