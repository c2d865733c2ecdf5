// The second tab: pixels stream into a picture, and three models complete it.

import { ask, Problem, reporting, say } from "./connection.js";
import { brush, coloursOf, drawCursor, pause } from "./drawing.js";
import { scenes } from "./scenes.js";

const MODELS = {
  "umbc+anchors": "UMBC, slots that begin as places",
  "umbc+set-transformer": "UMBC + Set Transformer, one vector",
  deepsets: "DeepSets (a neural process)",
};
const SIDE = 32;

const by = (id) => document.getElementById(id);
const easel = by("easel");
const panels = new Map();
let truth = null; // 1,024 colours, or null
let known = new Map(); // place -> colour
let waiting = new Map(); // place -> colour, or null to rub out: what the server has not heard of yet
let sending = null;
let playing = false;
let begun = false;
let lost = false; // the server has forgotten the picture

const cursor = brush(easel, 1 / SIDE, paint, drawEasel);

export async function start() {
  if (begun) return;
  begun = true;
  for (const [name, title] of Object.entries(MODELS)) {
    const figure = document.createElement("figure");
    figure.innerHTML = `<figcaption><strong></strong><span>NLL <output>–</output></span></figcaption><div class="pair"><div><canvas class="square pixels" role="img" width="32" height="32"></canvas><span>as it sees it</span></div><div><canvas class="square pixels" role="img" width="32" height="32"></canvas><span>where it is unsure</span></div></div>`;
    figure.querySelector("strong").textContent = title;
    figure.querySelector("output").id = `pixel-nll-${name}`;
    const [mean, scale] = figure.querySelectorAll("canvas");
    mean.id = `mean-${name}`;
    mean.setAttribute("aria-label", `The picture as ${title} completes it`);
    scale.setAttribute("aria-label", `Where ${title} is unsure: light is uncertain`);
    panels.set(name, { mean, scale, nll: figure.querySelector("output") });
    by("completions").append(figure);
  }
  by("hidden").onchange = guarded(() => begin(scenes[by("hidden").value]?.(SIDE) ?? null));
  by("file").onchange = guarded(openFile);
  by("clear-pixels").onclick = guarded(() => begin(truth));
  by("stream-pixels").onclick = guarded(() => (playing ? stop() : play()));
  document.addEventListener("disconnected", () => { stop(); [lost, waiting] = [true, new Map(known)]; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawEasel);
  await guarded(() => begin(scenes.ship(SIDE)))();
}

const guarded = (work) => reporting(work, stop);

async function begin(picture) {
  stop();
  [truth, known, waiting] = [picture, new Map(), new Map()];
  if (picture === null) document.querySelector("[name=tool][value=colour]").checked = true;
  await ask("picture", { colours: picture });
  lost = false;
  for (const { mean, scale, nll } of panels.values()) {
    nll.textContent = "–";
    for (const canvas of [mean, scale]) canvas.getContext("2d").clearRect(0, 0, SIDE, SIDE);
  }
  drawEasel();
  say(picture === null ? "paint some pixels" : "uncover some pixels, or stream them in");
}

async function openFile() {
  const [file] = by("file").files;
  if (!file) return;
  let image;
  try {
    image = await createImageBitmap(file);
  } catch {
    throw new Problem(`${file.name} is no picture that this browser can read`);
  }
  const side = Math.min(image.width, image.height);
  const canvas = new OffscreenCanvas(SIDE, SIDE);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, (image.width - side) / 2, (image.height - side) / 2, side, side, 0, 0, SIDE, SIDE);
  by("hidden").querySelector("[value=file]").disabled = false;
  scenes.file = () => coloursOf(context, SIDE);
  by("hidden").value = "file";
  await begin(scenes.file());
}

// -- painting -----------------------------------------------------------------------------------------------------------

function paint(at) {
  stop();
  const tool = document.querySelector("[name=tool]:checked").value;
  const half = (Number(by("brush-size").value) - 1) / 2;
  if (tool === "uncover" && truth === null) return say("there is no hidden picture: choose one, or paint", true);
  const own = by("colour").value.match(/\w\w/g).map((part) => parseInt(part, 16));
  for (const [x, y] of at) {
    const column = Math.min(SIDE - 1, Math.floor(x * SIDE)), row = Math.min(SIDE - 1, Math.floor(y * SIDE));
    for (let r = Math.max(0, row - half); r <= Math.min(SIDE - 1, row + half); r++) {
      for (let c = Math.max(0, column - half); c <= Math.min(SIDE - 1, column + half); c++) {
        const place = r * SIDE + c;
        put(place, tool === "erase" ? null : tool === "colour" ? own : truth[place]);
      }
    }
  }
  flush();
}

function put(place, value) {
  const now = known.get(place) ?? null;
  if (String(now) === String(value)) return;
  if (value === null) known.delete(place); else known.set(place, value);
  waiting.set(place, value);
}

function flush() {
  drawEasel();
  sending ??= guarded(send)().finally(() => { sending = null; });
  return sending;
}

async function send() {
  while (waiting.size) {
    if (lost) await ask("picture", { colours: truth });
    lost = false;
    const now = [...waiting];
    waiting = new Map();
    const pixels = now.filter(([, value]) => value !== null).map(([place, value]) => [place, ...value]);
    const erase = now.filter(([, value]) => value === null).map(([place]) => place);
    drawCompletions(await ask("paint", { pixels, erase }));
  }
}

async function play() {
  if (truth === null) throw new Problem("there is no hidden picture to stream: choose one");
  const left = Array.from({ length: SIDE * SIDE }, (_, place) => place).filter((place) => !known.has(place));
  for (let i = left.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [left[i], left[j]] = [left[j], left[i]];
  }
  playing = true;
  by("stream-pixels").textContent = "Pause";
  while (playing && left.length) {
    for (const place of left.splice(0, 8)) put(place, truth[place]);
    await Promise.all([flush(), pause(by("pixel-speed"))]);
  }
  stop();
}

function stop() {
  playing = false;
  by("stream-pixels").textContent = "Stream pixels in";
}

// -- drawing ------------------------------------------------------------------------------------------------------------

function drawEasel() {
  const cell = 12;
  if (easel.width !== SIDE * cell) easel.width = easel.height = SIDE * cell;
  const context = easel.getContext("2d");
  context.clearRect(0, 0, easel.width, easel.height);
  for (const [place, [r, g, b]] of known) {
    context.fillStyle = `rgb(${r} ${g} ${b})`;
    context.fillRect((place % SIDE) * cell, Math.floor(place / SIDE) * cell, cell, cell);
  }
  drawCursor(context, easel.width, easel.height, cursor, cell);
  by("known").textContent = known.size;
}

function drawCompletions(answer) {
  for (const [name, own] of Object.entries(answer.models)) {
    const panel = panels.get(name);
    show(panel.mean, (place) => own.mean.slice(3 * place, 3 * place + 3));
    const most = Math.max(...own.scale), least = Math.min(...own.scale);
    show(panel.scale, (place) => Array(3).fill(Math.round((255 * (own.scale[place] - least)) / Math.max(1, most - least))));
    panel.nll.textContent = own.nll === null ? "–" : own.nll.toFixed(3);
  }
}

function show(canvas, colourOf) {
  const image = new ImageData(SIDE, SIDE);
  for (let place = 0; place < SIDE * SIDE; place++) image.data.set([...colourOf(place), 255], 4 * place);
  canvas.getContext("2d").putImageData(image, 0, 0);
}
