// The first tab: a set of points streams into five models.

import { ask, each, reporting, say } from "./connection.js";
import { brush, colour, drawCursor, fresh, pause } from "./drawing.js";

const MODELS = {
  "umbc+em": "UMBC + two steps of EM",
  "umbc+set-transformer": "UMBC + Set Transformer",
  deepsets: "DeepSets",
  sse: "SSE",
  "set-transformer": "Set Transformer on chunks",
};
const ORDERS = ["single point", "class", "chunk", "one each"];
const REACH = 6; // the board shows -REACH to REACH
// Below this, orders agree: what is left is the rounding of float32.
const SAME = 1e-3;
const DASH = 5;

const by = (id) => document.getElementById(id);
const board = by("board");
const panels = new Map();
const set = { points: [], labels: [] };
let arrived = new Set();
let said = {}; // the models' last mixtures
let ends = {}; // of each model, at the end of each order
let curve = []; // [count, {model: nll}]
let oracle = null;
let road = null; // the chunks still to come; null: the stream has not begun
let playing = false;
let fresher = []; // painted points that wait to be sent
let sending = null;
let lost = false; // the server has forgotten the set

const cursor = brush(board, 1 / 48, paint, drawAll);

export function start() {
  for (const [name, title] of Object.entries(MODELS)) {
    const figure = document.createElement("figure");
    figure.innerHTML = `<figcaption><strong></strong><span>NLL <output>–</output></span></figcaption><canvas class="square" role="img"></canvas><p class="verdict"></p>`;
    figure.querySelector("strong").textContent = title;
    figure.querySelector("output").id = `nll-${name}`;
    const canvas = figure.querySelector("canvas");
    canvas.setAttribute("aria-label", `The clusters that ${title} sees`);
    panels.set(name, { canvas, nll: figure.querySelector("output"), verdict: figure.querySelector(".verdict") });
    by("panels").append(figure);
  }
  by("draw").onclick = guarded(() => draw(Math.floor(Math.random() * 2 ** 31)));
  by("clear").onclick = guarded(clear);
  by("play").onclick = guarded(() => (playing ? stop() : play()));
  by("rewind").onclick = guarded(rewind);
  by("compare").onclick = guarded(compare);
  by("order").onchange = guarded(rewind);
  board.addEventListener("keydown", (event) => {
    if (event.key >= "1" && event.key <= "4") document.querySelector(`[name=brush][value="${event.key - 1}"]`).checked = true;
  });
  document.addEventListener("disconnected", () => { stop(); lost = true; forget(); });
  new ResizeObserver(drawAll).observe(board);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  return draw(129); // easy to see
}

const guarded = (work) => reporting(work, stop);

// Ask about the set; tell a server that has lost it what it was.
async function askOf(verb, fields, asking = ask) {
  if (lost) {
    await ask("clear");
    for (let first = 0; first < set.points.length; first += 500) {
      const part = [first, first + 500];
      oracle = (await ask("put", { points: set.points.slice(...part), labels: set.labels.slice(...part) })).oracle;
    }
    lost = false;
  }
  return asking(verb, fields);
}

// -- the set ------------------------------------------------------------------------------------------------------------

async function draw(seed) {
  stop();
  const answer = await ask("draw", { seed, points: Number(by("size").value) });
  [set.points, set.labels, lost] = [answer.points, answer.labels, false];
  forget(answer.oracle);
  say("a set from a random mixture of four Gaussians");
}

async function clear() {
  stop();
  await ask("clear");
  [set.points, set.labels, lost] = [[], [], false];
  forget(null);
  say("paint some points");
}

function forget(known = oracle) {
  oracle = known;
  [arrived, said, ends, curve, road] = [new Set(), {}, {}, [], null];
  drawAll();
}

// Points that are painted arrive at once, in the order of the brush.
function paint(at) {
  stop();
  const label = Number(document.querySelector("[name=brush]:checked").value);
  const points = at.map(([x, y]) => [(2 * x - 1) * REACH, (1 - 2 * y) * REACH]);
  fresher.push(...points.map((point) => [point, label]));
  sending ??= guarded(send)().finally(() => { sending = null; });
}

async function send() {
  while (fresher.length) {
    const now = fresher.splice(0, 200);
    const known = await askOf("put", { points: now.map(([point]) => point), labels: now.map(([, label]) => label) });
    const first = set.points.length;
    set.points.push(...now.map(([point]) => point));
    set.labels.push(...now.map(([, label]) => label));
    oracle = known.oracle;
    ends = {};
    await append([now.map((_, index) => first + index)]);
  }
}

// -- the stream ---------------------------------------------------------------------------------------------------------

async function append(chunks) {
  const answer = await askOf("append", { chunks });
  for (const chunk of chunks) for (const position of chunk) arrived.add(position);
  said = answer.models;
  curve.push([answer.count, Object.fromEntries(Object.entries(said).map(([name, own]) => [name, own.nll]))]);
  drawAll();
}

async function rewind() {
  stop();
  await askOf("rewind");
  forget();
}

async function play() {
  if (road === null || !road.length) {
    await askOf("rewind");
    forget();
    road = (await askOf("order", { kind: by("order").value, seed: Math.floor(Math.random() * 2 ** 31) })).chunks;
  }
  playing = true;
  by("play").textContent = "Pause";
  say("streaming");
  while (playing && road.length) {
    // A slider at its end skips frames, never chunks.
    const turns = Number(by("speed").value) >= 100 ? 8 : 1;
    await Promise.all([append(road.splice(0, turns)), pause(by("speed"))]);
  }
  if (playing) say("the whole set has arrived: compare the orders, or stream it in another");
  stop();
}

function stop() {
  playing = false;
  by("play").textContent = "Stream";
}

async function compare() {
  stop();
  say("streaming the set in all four orders");
  by("compare").disabled = true;
  ends = {};
  try {
    await askOf("compare", {}, (verb, fields) => each(verb, fields, (answer) => {
      if (answer.model) ends[answer.model] = answer;
      drawAll();
    }));
    say("four orders of one set, a colour each: where a model gives one answer, its ellipses are one, in four colours");
  } finally {
    by("compare").disabled = false;
  }
}

// -- drawing ------------------------------------------------------------------------------------------------------------

function drawAll() {
  by("count").textContent = arrived.size;
  by("total").textContent = set.points.length;
  by("oracle").textContent = oracle === null ? "–" : oracle.toFixed(3);
  drawPoints(board, true);
  for (const [name, panel] of panels) drawPanel(name, panel);
  drawCurve();
  drawTable();
}

function drawPoints(canvas, coloured) {
  const { context, width, height } = fresh(canvas);
  const scale = width / (2 * REACH);
  const size = Math.max(1.3, Math.min(3, 30 / Math.sqrt(set.points.length || 1)));
  const faint = colour("faint");
  const colours = [0, 1, 2, 3].map((own) => colour(`c${own}`));
  set.points.forEach(([x, y], index) => {
    const here = arrived.has(index);
    context.fillStyle = coloured ? colours[set.labels[index] % 4] : faint;
    context.globalAlpha = here || coloured ? (here ? 0.95 : 0.4) : 0.25;
    context.beginPath();
    context.arc(width / 2 + x * scale, height / 2 - y * scale, size, 0, 7);
    context.fill();
  });
  context.globalAlpha = 1;
  if (coloured) drawCursor(context, width, height, cursor);
  return { context, width, height, scale };
}

function drawPanel(name, { canvas, nll, verdict }) {
  const view = drawPoints(canvas, false);
  const mine = ends[name];
  const mixtures = mine ? ORDERS.map((order, index) => [mine.streams[order].mixture, colour(`c${index}`)]) : [];
  if (!mine && said[name]) mixtures.push([said[name].mixture, colour("accent")]);
  mixtures.forEach(([mixture, stroke], index) => drawMixture(view, mixture, stroke, mine ? index : null));
  nll.textContent = said[name] ? said[name].nll.toFixed(3) : "–";
  verdict.textContent = !mine ? "" : mine.disagreement < SAME
    ? `one answer for all orders (they differ by ${mine.disagreement.toExponential(0)})`
    : `four orders, four answers: they differ by ${mine.disagreement.toFixed(2)} nats a point`;
}

// Two standard deviations. The four orders' ellipses are dashed in turn: where they are one, it has all four colours.
function drawMixture({ context, width, height, scale }, mixture, stroke, turn) {
  context.strokeStyle = stroke;
  context.lineWidth = 2.5;
  context.setLineDash(turn === null ? [] : [DASH, 3 * DASH]);
  context.lineDashOffset = -(turn ?? 0) * DASH;
  mixture.means.forEach(([x, y], index) => {
    context.globalAlpha = 0.25 + 0.75 * Math.min(1, 2 * mixture.weights[index]);
    const [a, b] = mixture.scales[index];
    context.beginPath();
    context.ellipse(width / 2 + x * scale, height / 2 - y * scale, 2 * a * scale, 2 * b * scale, 0, 0, 7);
    context.stroke();
  });
  context.setLineDash([]);
  context.globalAlpha = 1;
}

// NLL against the number of points, from somewhat below the oracle's to some nats above it.
function drawCurve() {
  const { context, width, height } = fresh(by("curve"));
  const low = (oracle ?? 1) - 0.3, high = low + 4, total = Math.max(1, set.points.length);
  const place = ([count, nll]) => [8 + (count / total) * (width - 16), height - 8 - (Math.min(nll, high) - low) / (high - low) * (height - 24)];
  context.font = "12px system-ui, sans-serif";
  const names = Object.keys(MODELS), share = (width - 16) / names.length;
  names.forEach((name, index) => {
    context.strokeStyle = context.fillStyle = colour(`c${index}`);
    context.lineWidth = 2;
    context.beginPath();
    for (const [count, nlls] of curve) context.lineTo(...place([count, nlls[name]]));
    context.stroke();
    context.fillText(name, 10 + index * share, 12, share - 6);
  });
  if (oracle !== null) {
    const [, y] = place([0, oracle]);
    context.strokeStyle = colour("faint");
    context.setLineDash([5, 4]);
    context.beginPath();
    context.moveTo(8, y);
    context.lineTo(width - 8, y);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = colour("faint");
    context.fillText("oracle", 10, y + 12);
  }
}

function drawTable() {
  const table = by("ends");
  table.hidden = Object.keys(ends).length === 0;
  table.tBodies[0].replaceChildren(...Object.values(ends).map((own) => {
    const row = document.createElement("tr");
    const cells = [MODELS[own.model], ...ORDERS.map((order) => own.streams[order].nll.toFixed(3)), own.disagreement.toExponential(1)];
    row.dataset.model = own.model;
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    return row;
  }));
}
