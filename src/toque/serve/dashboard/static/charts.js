// Small charts on canvas: a window of seconds, lines or stacked areas, a readout under the pointer.

import { colour, duration, count, rate } from "./format.js";

export const WINDOW_S = 300;
const LEAST_S = 60; // shown while less has been seen
const MARGIN = { left: 44, right: 6, top: 8, bottom: 18 };

/** A canvas's context in CSS pixels, sharp on any screen. */
export function sharp(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** The least round number that holds all of it, and whose half is round too. */
function nice(top, least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(top, least)));
  return [1, 2, 4, 10].map((step) => step * power).find((step) => step >= Math.max(top, least));
}

/** `series`: {name, colour, value(second), area, dash}; areas are stacked in their order. */
export class Chart {
  constructor(canvas, readout, series, unit) {
    Object.assign(this, { canvas, readout, series, unit, at: null, seconds: [], lines: [], now: 0, window: LEAST_S });
    canvas.addEventListener("pointermove", (event) => {
      this.at = event.offsetX;
      this.draw();
    });
    canvas.addEventListener("pointerleave", () => {
      this.at = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(seconds, now, lines = []) {
    const seen = seconds.length ? now - seconds[0].t : 0;
    this.window = seen > 2 * LEAST_S ? WINDOW_S : seen > LEAST_S ? 2 * LEAST_S : LEAST_S;
    Object.assign(this, { seconds, now, lines });
    this.draw();
  }

  say(value) {
    if (value === null || value === undefined) return "–";
    if (this.unit === "ms") return duration(value);
    return this.unit === "rate" ? rate(value) : count(value);
  }

  draw() {
    const { context, width, height } = sharp(this.canvas);
    const frame = { x: MARGIN.left, y: MARGIN.top, w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
    const rows = this.seconds.filter((second) => second.t > this.now - this.window);
    const top = this.scale(rows);
    const x = (t) => frame.x + frame.w * (1 - (this.now - t) / this.window);
    const y = (value) => frame.y + frame.h * (1 - Math.min(1, value / top));
    this.axes(context, frame, top, y, rows);
    this.areas(context, rows, x, y);
    for (const series of this.series.filter((one) => !one.area)) this.line(context, rows, series, x, y);
    for (const line of this.lines) this.target(context, frame, line, top, y);
    this.tell(context, frame, rows, x);
  }

  scale(rows) {
    let top = 0;
    for (const row of rows) {
      let stacked = 0;
      for (const series of this.series) {
        const value = series.value(row) ?? 0;
        stacked = series.area ? stacked + value : stacked;
        top = Math.max(top, value, stacked);
      }
    }
    for (const line of this.lines) if (line.value < 3 * top) top = Math.max(top, line.value);
    return nice(top * 1.02, this.unit === "count" ? 2 : 1);
  }

  axes(context, frame, top, y, rows) {
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("soft");
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const empty = this.unit === "ms" && !rows.some((row) => this.series.some((series) => series.value(row) !== null));
    for (const part of empty ? [0] : [0, 0.5, 1]) {
      const at = Math.round(y(part * top)) + 0.5;
      context.beginPath();
      context.moveTo(frame.x, at);
      context.lineTo(frame.x + frame.w, at);
      context.stroke();
      context.fillText(part ? this.say(part * top) : "0", frame.x - 6, at);
    }
    if (empty) {
      context.textAlign = "center";
      context.fillText("no tokens in this time", frame.x + frame.w / 2, frame.y + frame.h / 2);
    }
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText(this.window / 60 + " min ago", frame.x, frame.y + frame.h + 5);
    context.textAlign = "right";
    context.fillText("now", frame.x + frame.w, frame.y + frame.h + 5);
  }

  areas(context, rows, x, y) {
    const stacked = this.series.filter((series) => series.area);
    const base = new Map(rows.map((row) => [row.t, 0]));
    for (const series of stacked) {
      context.fillStyle = colour(series.colour);
      for (const row of rows) {
        const from = base.get(row.t), value = series.value(row) ?? 0;
        base.set(row.t, from + value);
        const left = x(row.t - 1);
        context.fillRect(left, y(from + value), Math.max(1, x(row.t) - left - 0.25), y(from) - y(from + value));
      }
    }
  }

  line(context, rows, series, x, y) {
    context.strokeStyle = context.fillStyle = colour(series.colour);
    context.globalAlpha = series.faint ? 0.45 : 1;
    context.lineWidth = series.faint ? 1.2 : 1.8;
    context.lineJoin = "round";
    context.beginPath();
    let last = null;
    for (const row of rows) {
      const value = series.value(row);
      if (value === null || value === undefined) continue;
      if (last !== null && row.t - last.t <= 3) context.lineTo(x(row.t), y(value));
      else {
        if (last && last.alone) context.fillRect(x(last.t) - 1, y(last.value) - 1, 2.5, 2.5);
        context.moveTo(x(row.t), y(value));
      }
      last = { t: row.t, value, alone: last === null || row.t - last.t > 3 };
    }
    if (last && last.alone) context.fillRect(x(last.t) - 1, y(last.value) - 1, 2.5, 2.5);
    context.stroke();
    context.globalAlpha = 1;
  }

  target(context, frame, line, top, y) {
    if (line.value > top) return;
    const at = Math.round(y(line.value)) + 0.5;
    context.strokeStyle = colour("bad");
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(frame.x, at);
    context.lineTo(frame.x + frame.w, at);
    context.stroke();
    context.setLineDash([]);
  }

  tell(context, frame, rows, x) {
    let row = rows.length && this.now - rows[rows.length - 1].t < 4 ? rows[rows.length - 1] : null;
    let when = "";
    if (this.at !== null && rows.length) {
      const t = this.now - this.window * (1 - (this.at - frame.x) / frame.w);
      row = rows.reduce((best, one) => (Math.abs(one.t - t) < Math.abs(best.t - t) ? one : best));
      when = Math.round(this.now - row.t) + " s ago: ";
      context.strokeStyle = colour("soft");
      context.beginPath();
      context.moveTo(x(row.t), frame.y);
      context.lineTo(x(row.t), frame.y + frame.h);
      context.stroke();
    }
    const parts = this.series.map((series) => series.name + " " + this.say(row ? series.value(row) : this.unit === "ms" ? null : 0));
    this.readout.textContent = when + parts.join(", ");
    this.canvas.setAttribute("aria-label", this.readout.textContent);
  }
}

/** The last steps as columns: what was computed of prompts under what was decoded. */
export function drawSteps(canvas, steps) {
  const { context, width, height } = sharp(canvas);
  const column = 6, most = Math.floor(width / column);
  const shown = steps.slice(-most);
  const top = Math.max(1, ...shown.map((step) => step[2] + step[3]));
  const room = height - 14;
  shown.forEach((step, place) => {
    const left = width - (shown.length - place) * column;
    const prompt = (room * step[2]) / top, decode = (room * step[3]) / top;
    context.fillStyle = colour("prompt");
    if (prompt) context.fillRect(left, height - prompt, column - 1.5, prompt);
    context.fillStyle = colour("output");
    if (decode) context.fillRect(left, height - prompt - Math.max(1.5, decode), column - 1.5, Math.max(1.5, decode));
  });
  context.fillStyle = colour("soft");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  if (shown.length) context.fillText("up to " + count(top) + " tokens", 0, 0);
}
