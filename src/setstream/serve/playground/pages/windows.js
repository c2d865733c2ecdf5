// The third tab: events arrive, and a window of the last seconds slides over them.

import { ask, reporting, say } from "./connection.js";
import { brush, colour, disc, drawCursor, fresh, pause } from "./drawing.js";

const MODELS = {
  attention: { title: "Sharp attention", about: "looks at the highest loads", bars: "share of its weight, by machine" },
  maximum: { title: "Maximum", about: "the highest load", bars: "highest load, by machine" },
  mean: { title: "Mean", about: "to compare: it can subtract", bars: "share of the events, by machine" },
};
const REFUSED = {
  RemovalError: "refused: a maximum does not know the value below it",
  PrecisionError: "refused: mostly rounding errors would be left",
};
const MACHINES = [0, 1, 2, 3];
const PAD = 16; // above and below a load of 1 and 0

const by = (id) => document.getElementById(id);
const timeline = by("timeline");
const panels = new Map();
let seed = 13; // incidents all over its time
let seconds = 120;
let events = []; // [time, load, machine]
let reported = []; // those of them that the visitor reported
let now = 0; // all events before this second have arrived
let length = 20, until = 0; // the window
let view = null; // the server's last answer about a window
let curve = []; // at each second: what the models said at its end
let apart = null; // how far the curve is from recomputing it; null: not known
let stale = { look: false, sweep: false };
let refreshing = null;
let fresher = []; // reported events that wait to be sent
let sending = null;
let playing = null; // the run of the stream that is on
let running = null; // its promise
let begun = false;
let lost = false; // the server has forgotten the events

const cursor = brush(timeline, 1 / 60, point, drawAll);

export async function start() {
  if (begun) return;
  begun = true;
  for (const [name, { title, about, bars }] of Object.entries(MODELS)) {
    const figure = document.createElement("figure");
    figure.className = "look";
    figure.innerHTML = `<figcaption><strong></strong><span></span></figcaption><p class="load"><output>–</output>load</p>
      <table class="bars"><caption></caption><tbody></tbody></table>
      <dl class="check"><dt>from scratch</dt><dd>–</dd></dl><dl class="check"><dt>by subtraction</dt><dd>–</dd></dl>`;
    figure.querySelector("strong").textContent = title;
    figure.querySelector("figcaption span").textContent = about;
    figure.querySelector("caption").textContent = bars;
    const load = figure.querySelector("output");
    load.id = `load-${name}`;
    const rows = MACHINES.map((machine) => {
      const row = figure.querySelector("tbody").insertRow();
      row.innerHTML = `<th scope="row" class="c${machine}">${machine + 1}</th><td class="c${machine}"><i></i></td><td></td>`;
      return { bar: row.querySelector("i"), value: row.cells[2] };
    });
    const [scratch, subtracted] = figure.querySelectorAll("dd");
    scratch.id = `scratch-${name}`;
    subtracted.id = `subtracted-${name}`;
    panels.set(name, { load, rows, scratch, subtracted });
    by("looks").append(figure);
  }
  by("new-events").onclick = guarded(() => begin(Math.floor(Math.random() * 2 ** 31)));
  by("stream-events").onclick = guarded(async () => {
    if (playing) return stop();
    if (now >= seconds) await begin(seed, 0, reported);
    running = play();
    await running;
  });
  by("length").oninput = () => { length = Number(by("length").value); [curve, apart] = [[], null]; refresh({ look: true }); };
  by("length").onchange = () => refresh({ sweep: true });
  by("until").oninput = () => slide(Number(by("until").value));
  by("follow").onchange = () => { if (by("follow").checked) slide(now); };
  for (const radio of document.querySelectorAll("[name=pointer]")) radio.onchange = drawAll;
  timeline.addEventListener("keydown", (event) => {
    if (event.key < "0" || event.key > "4") return;
    document.querySelector(`[name=pointer][value="${event.key === "0" ? "slide" : event.key - 1}"]`).checked = true;
    drawAll();
  });
  document.addEventListener("disconnected", () => { stop(); lost = true; });
  new ResizeObserver(drawAll).observe(timeline);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  for (const button of [by("stream-events"), by("new-events")]) button.disabled = true;
  await guarded(() => begin(seed, 40))();
  for (const button of [by("stream-events"), by("new-events")]) button.disabled = false;
}

const guarded = (work) => reporting(work, stop);

// Ask about the events; tell a server that has lost them what they were.
async function askOf(verb, fields) {
  if (lost) {
    await load();
    if (now) await ask("advance", { to: now, length });
    lost = false;
  }
  return ask(verb, fields);
}

async function load() {
  const answer = await ask("simulate", { seed });
  if (reported.length) await ask("report", { events: reported });
  [events, seconds] = [[...answer.events, ...reported], answer.seconds];
}

async function begin(from, to = 0, kept = []) {
  stop();
  await Promise.allSettled([running, refreshing, sending]); // they are about other events
  [seed, reported, events, lost] = [from, kept, [], false];
  [now, until, view, curve, apart] = [0, 0, null, [], null];
  by("follow").checked = true;
  await load();
  if (to) {
    await advance(to);
    await refresh({ sweep: true });
  }
  drawAll();
  say("stream the events; slide the window; report events of your own, also late ones");
}

// -- the stream ---------------------------------------------------------------------------------------------------------

async function advance(to) {
  const before = now;
  const answer = await askOf("advance", { to, length });
  now = answer.now;
  // The window may have become longer or shorter meanwhile: then the whole curve is on its way.
  if (curve.length === before) curve.push(...answer.curve); else stale.sweep = true;
  apart = null;
  if (by("follow").checked) until = now;
  await refresh({ look: true });
}

async function play() {
  const mine = playing = {};
  by("stream-events").textContent = "Pause";
  say("streaming");
  while (playing === mine && now < seconds) {
    // A slider at its end skips frames, never events.
    const step = Number(by("event-speed").value) >= 100 ? 8 : 1;
    await Promise.all([advance(Math.min(seconds, now + step)), pause(by("event-speed"))]);
  }
  if (playing === mine) {
    say("all events have arrived: slide the window over them");
    stop();
  }
  if (!playing) await refresh({ sweep: true });
}

function stop() {
  playing = null;
  by("stream-events").textContent = "Stream";
}

function slide(to) {
  until = Math.min(now, Math.max(1, Math.round(to)));
  by("follow").checked = until === now;
  refresh({ look: true });
}

// Where the pointer is: the middle of the window, or new events. Those of seconds that have passed are late.
function point(at) {
  if (!events.length) return;
  const tool = document.querySelector("[name=pointer]:checked").value;
  if (tool === "slide") return slide(at.at(-1)[0] * seconds + length / 2);
  const place = (y) => Math.min(1, Math.max(0, 1 - (y * timeline.clientHeight - PAD) / (timeline.clientHeight - 2 * PAD)));
  fresher.push(...at.map(([x, y]) => [Math.min(x, 0.9999) * seconds, place(y), Number(tool)]));
  sending ??= guarded(send)().finally(() => { sending = null; });
}

async function send() {
  let late = 0;
  while (fresher.length) {
    const some = fresher.splice(0, 200);
    late += (await askOf("report", { events: some })).late;
    events.push(...some);
    reported.push(...some);
    drawAll();
  }
  say(late ? `late, and counted in their seconds: ${late} ${late === 1 ? "event" : "events"}` : "they arrive when the stream is there");
  if (late) await refresh({ look: true, sweep: true });
}

// Ask anew about the window, and about all places of it, until nothing has changed in the meantime.
function refresh(wanted) {
  stale = { look: stale.look || Boolean(wanted.look), sweep: stale.sweep || Boolean(wanted.sweep) };
  drawAll();
  refreshing ??= guarded(askAgain)().finally(() => { refreshing = null; });
  return refreshing;
}

async function askAgain() {
  while ((stale.look || stale.sweep) && now) {
    if (stale.look) {
      stale.look = false;
      view = await askOf("look", { length, until: Math.max(1, until) });
    } else {
      stale.sweep = false;
      const swept = length;
      const answer = await askOf("sweep", { length });
      if (swept === length) ({ curve, apart } = answer);
    }
    drawAll();
  }
}

// -- drawing ------------------------------------------------------------------------------------------------------------

function drawAll() {
  const since = Math.max(0, until - length);
  timeline.classList.toggle("reports", document.querySelector("[name=pointer]:checked").value !== "slide");
  by("until").value = until;
  by("length-text").textContent = `${length} s`;
  by("until-text").textContent = until ? `${since} to ${until} s` : "–";
  by("arrived").textContent = events.filter(([time]) => time < now).length;
  by("all-events").textContent = events.length;
  by("inside").textContent = view?.count ?? 0;
  by("slid").textContent = apart === null ? "–" : `the same to ${apart.toExponential(0)}`;
  drawEvents(since);
  drawAnswers(since);
  drawLooks();
  drawCall();
}

const acrossOf = (width) => (time) => (time / seconds) * width;
const upOf = (height, pad) => (load) => height - pad - load * (height - 2 * pad);

function drawWindow(context, across, height, since) {
  context.fillStyle = context.strokeStyle = colour("accent");
  context.lineWidth = 1.5;
  context.globalAlpha = 0.1;
  context.fillRect(across(since), 0, across(until) - across(since), height);
  context.globalAlpha = 1;
  for (const edge of [since, until]) line(context, [[across(edge), 0], [across(edge), height]]);
}

function drawEvents(since) {
  const { context, width, height } = fresh(timeline);
  const across = acrossOf(width), up = upOf(height, PAD);
  const colours = MACHINES.map((machine) => colour(`c${machine}`));
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("faint");
  for (let time = 20; time < seconds; time += 20) context.fillText(`${time} s`, across(time) - 10, height - 3);
  context.fillText("load", 6, 13);
  if (now && now < seconds) {
    context.strokeStyle = colour("line");
    context.setLineDash([4, 4]);
    line(context, [[across(now), 0], [across(now), height]]);
    context.setLineDash([]);
  }
  if (until) drawWindow(context, across, height, since);
  if (across(until - since) > 70) {
    context.textAlign = "center";
    context.fillText(until === now ? `the last ${length} s` : `${since} to ${until} s`, across((since + until) / 2), 13);
    context.textAlign = "start";
  }
  const current = view && view.until === until && view.since === since;
  context.globalAlpha = 0.22;
  for (const [index, weight] of current ? view.weights : []) {
    const [time, load, machine] = events[index];
    if (weight > 0.002) disc(context, colours[machine], across(time), up(load), 3 + 22 * Math.sqrt(weight));
  }
  for (const [time, load, machine] of events) {
    context.globalAlpha = time >= now ? 0.15 : time >= since && time < until ? 0.95 : 0.4;
    disc(context, colours[machine], across(time), up(load), time >= since && time < until ? 2.8 : 2.2);
  }
  context.globalAlpha = 1;
  const highest = current ? view.models.maximum?.answer.slice(1) ?? [] : [];
  context.lineWidth = 1.5;
  context.setLineDash([4, 3]);
  highest.forEach((load, machine) => {
    if (!load) return;
    context.strokeStyle = colours[machine];
    line(context, [[across(since), up(load)], [across(until), up(load)]]);
  });
  context.setLineDash([]);
  drawCursor(context, width, height, cursor);
}

// What each model answered at the end of each second: attention in the colour of the machine that it looks at most.
function drawAnswers(since) {
  const { context, width, height } = fresh(by("answers"));
  const across = acrossOf(width), up = upOf(height, 18);
  if (until) drawWindow(context, across, height, since);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("faint");
  context.fillText("answer when the window ends here", 6, 13);
  const at = (row) => curve.map((said, index) => said && [across(index + 1), up(said[row][0])]);
  const looks = { 2: [1.5, "faint", []], 1: [1.5, "ink", [5, 4]] };
  for (const [row, [thick, stroke, dash]] of Object.entries(looks)) {
    [context.lineWidth, context.strokeStyle] = [thick, colour(stroke)];
    context.setLineDash(dash);
    line(context, at(row).filter(Boolean));
  }
  context.setLineDash([]);
  context.lineWidth = 3;
  let last = null;
  at(0).forEach((place, index) => {
    if (!place) return;
    const shares = curve[index][0].slice(1);
    context.strokeStyle = colour(`c${shares.indexOf(Math.max(...shares))}`);
    line(context, [last ?? place, place]);
    last = place;
    if (index + 1 === until) disc(context, context.strokeStyle, ...place, 5);
  });
}

function line(context, places) {
  context.beginPath();
  for (const place of places) context.lineTo(...place);
  context.stroke();
}

function drawLooks() {
  for (const [name, { load, rows, scratch, subtracted }] of panels) {
    const own = view?.models[name];
    load.textContent = own ? own.answer[0].toFixed(3) : "–";
    rows.forEach(({ bar, value }, machine) => {
      const size = own ? own.answer[machine + 1] : 0;
      bar.style.width = `${100 * Math.min(1, Math.max(0, size))}%`;
      value.textContent = own ? size.toFixed(2) : "–";
    });
    scratch.textContent = own ? `${view.count} events, ${off(own.apart)}` : "–";
    subtracted.textContent = !own ? "–" : REFUSED[own.subtracted.refused] ?? off(own.subtracted.apart);
    subtracted.className = own?.subtracted.refused ? "refused" : "";
  }
}

function off(apart) {
  if (apart === null) return "nothing is too old yet";
  return apart === 0 ? "exactly the same" : `the same to ${apart.toExponential(0)}`;
}

// How a program asks for what is shown.
function drawCall() {
  if (!view) return;
  const range = { since: view.until - length, until: view.until };
  by("call-kind").textContent = view.live ? "The last seconds, in your program:" : "Seconds of the past, in your program:";
  by("call-python").textContent = view.live ? `window.predict(${length})` : `store.predict("id", since=${range.since}, until=${range.until})`;
  by("call-route").textContent = view.live
    ? `WebSocket /sets/id/live?last=${length}`
    : `GET /sets/id/prediction?since=${range.since}&until=${range.until}`;
}
