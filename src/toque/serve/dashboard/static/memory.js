// Box 2: every KV page as a cell coloured by its state, and the prefix tree.

import { $, colour, count, setText, share, svg } from "./format.js";
import { sharp } from "./charts.js";

const STATES = { f: "free", c: "cached", h: "held", s: "shared" };
const MAP_HEIGHT = 230;
const MOST_ROWS = 48; // leaves of the tree that get a line of their own

/** "12h3f" -> cells. */
export function cells(runs) {
  const found = [];
  for (const [, length, letter] of runs.matchAll(/(\d+)([a-z])/g)) for (let i = 0; i < +length; i++) found.push(letter);
  return found;
}

export class Memory {
  constructor() {
    this.cells = [];
    new ResizeObserver(() => this.draw()).observe($("pages"));
  }

  show(document_) {
    const { board, model, totals, engine } = document_;
    const load = engine ? engine.load : document_.load;
    $("whose").hidden = !engine;
    if (engine) setText($("whose"), "of engine " + engine.index + ", " + engine.role);
    if (model) {
      const used = load.total_pages ? load.held_pages / load.total_pages : 0;
      setText($("pool"), count(load.total_pages) + " pages of " + model.block_size + " tokens, " + model.kv_cache_dtype + " · " + share(used) + " held");
    }
    this.cells = board ? cells(board.pages) : [];
    $("pages").hidden = engine !== undefined && !board;
    $("pages-empty").hidden = !$("pages").hidden;
    if (engine) setText($("pages-empty"), engine.life === "alive" ? "This engine has not shown its pages yet." : "This engine is " + engine.life + ": it has no pages.");
    this.counts(load, board);
    this.draw();
    this.note(load, model, totals, board, engine ? " (all engines)" : "");
    drawTree($("tree"), board ? board.tree : []);
    const grown = board !== null && board.tree.length > 0;
    $("tree").toggleAttribute("hidden", !grown); // an SVG element has no property for it
    $("tree-empty").hidden = grown || !$("pages-empty").hidden;
    setText($("tree-note"), !board ? "" : board.tree.length < board.branches ? "the largest " + board.tree.length + " of " + count(board.branches) + " branches" : board.branches ? count(board.branches) + (board.branches === 1 ? " branch" : " branches") : "");
  }

  counts(load, board) {
    const shared = board ? board.shared : 0; // of a moment beside that of the load
    setText($("n-held"), count(Math.max(0, load.held_pages - shared)));
    setText($("n-shared"), board ? count(shared) : "–");
    setText($("n-cached"), count(load.cached_pages));
    setText($("n-free"), count(load.free_pages));
    $("pages").setAttribute("aria-label", `Map of the KV pages: ${load.held_pages} held, ${load.cached_pages} cached, ${load.free_pages} free`);
  }

  note(load, model, totals, board, where) {
    const parts = [];
    if (totals.prefix_queries) parts.push(share(totals.prefix_hits / totals.prefix_queries) + " of prompt tokens were found in the cache" + where);
    if (load.held_pages && model) parts.push(share(load.empty_places / (load.held_pages * model.block_size)) + " of held places are empty");
    if (totals.preemptions) parts.push(count(totals.preemptions) + " preemptions" + where);
    if (board && board.pages_per_cell > 1) parts.push("a cell is " + board.pages_per_cell + " pages");
    setText($("pages-note"), parts.join(" · "));
  }

  draw() {
    const canvas = $("pages"), total = this.cells.length;
    if (!total || !canvas.clientWidth) return;
    let size = 20; // the largest cell with which all fit
    while (size > 2 && Math.ceil(total / Math.floor(canvas.clientWidth / size)) * size > MAP_HEIGHT) size -= 0.5;
    const columns = Math.floor(canvas.clientWidth / size), gap = size > 5 ? 1.5 : size > 3 ? 0.75 : 0;
    canvas.style.height = Math.ceil(total / columns) * size + "px";
    const { context } = sharp(canvas);
    const paint = Object.fromEntries(Object.entries(STATES).map(([letter, name]) => [letter, colour(name === "held" ? "prompt" : name)]));
    for (let place = 0; place < total; place++) {
      context.fillStyle = paint[this.cells[place]];
      context.fillRect((place % columns) * size, Math.floor(place / columns) * size, size - gap, size - gap);
    }
  }
}

/** Beginnings to the left, what follows them to the right; a branch is as wide as it has pages. */
export function drawTree(target, tree) {
  const nodes = tree.map(([parent, pages, holders, pending]) => ({ parent, pages, holders, pending, children: [], leaves: 0, start: 0 }));
  const roots = [];
  nodes.forEach((node) => (node.parent >= 0 ? nodes[node.parent].children : roots).push(node));
  for (const node of [...nodes].reverse()) node.leaves = node.children.reduce((sum, child) => sum + child.leaves, 0) || 1;
  for (const node of nodes) node.start = node.parent >= 0 ? nodes[node.parent].start + nodes[node.parent].pages : 0;
  const leaves = roots.reduce((sum, root) => sum + root.leaves, 0);
  const deepest = Math.max(1, ...nodes.map((node) => node.start + node.pages));
  const line = Math.max(3, Math.min(13, (13 * MOST_ROWS) / Math.max(MOST_ROWS, leaves) / (leaves > MOST_ROWS ? 2 : 1)));
  const height = Math.max(line, leaves * line);
  const width = 1000;
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.setAttribute("preserveAspectRatio", "none");
  target.style.height = Math.min(320, height) + "px";
  const rects = [];
  const place = (node, top) => {
    const kind = node.pending ? "pending" : node.holders > 1 ? "shared" : node.holders ? "held" : "cached";
    const rect = svg("rect", { class: "t-" + kind, x: (width * node.start) / deepest, y: top, rx: 2,
      width: Math.max(2, (width * node.pages) / deepest - 1), height: Math.max(1.5, node.leaves * line - 1.5) });
    rect.append(svg("title"));
    rect.firstChild.textContent = `${node.pages} pages, ${kind}` + (node.holders > 1 ? ` by ${node.holders}` : "");
    rects.push(rect);
    for (const child of node.children) {
      place(child, top);
      top += child.leaves * line;
    }
  };
  let top = 0;
  for (const root of roots) {
    place(root, top);
    top += root.leaves * line;
  }
  target.replaceChildren(...rects);
}
