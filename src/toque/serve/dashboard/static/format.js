// Numbers with units, colours by meaning, and a way to make elements.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const SPACE = "\u202f"; // thin, never broken

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return (value / 1e6).toFixed(value < 1e7 ? 2 : 1) + SPACE + "M";
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, SPACE);
}

/** Bytes, in the unit that reads best. */
export function amount(bytes) {
  const power = bytes < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return (power ? (bytes / 1000 ** power).toPrecision(3) : count(bytes)) + SPACE + ["B", "kB", "MB", "GB", "TB"][power];
}

export function rate(value) {
  return value < 10 ? value.toFixed(1) : count(value);
}

export function share(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const percent = 100 * value;
  return (percent > 0 && percent < 1 ? "<1" : percent > 99 && percent < 100 ? percent.toFixed(1) : Math.round(percent)) + SPACE + "%";
}

/** A duration in milliseconds, in the unit that reads best. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return ms.toFixed(1) + SPACE + "ms";
  if (ms < 1000) return Math.round(ms) + SPACE + "ms";
  if (ms < 60000) return (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + SPACE + "s";
  if (ms < 3600000) return Math.floor(ms / 60000) + SPACE + "min" + SPACE + Math.round((ms % 60000) / 1000) + SPACE + "s";
  return (ms / 3600000).toFixed(1) + SPACE + "h";
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

/** Eight characters tell the requests of a page apart; choices keep their number. */
export function shortId(id) {
  const dash = id.lastIndexOf("-");
  const tail = dash >= 0 ? id.slice(dash + 1) : "";
  return id.slice(0, 6) + (tail && tail !== "0" && tail.length < 4 ? "·" + tail : "");
}

export const WAITS = {
  step: "for the step's end", rows: "for a row", pages: "for pages", budget: "for room in the step", behind: "behind others",
  shared_page: "for a shared page", slo: "for running streams' targets",
};

export function waits(reason) {
  return "waits " + (WAITS[reason] || "(" + reason + ")");
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
