// Canvases: sharp on every screen, in the page's colours, painted on with pointer and keyboard.

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// The context of a canvas whose units are CSS pixels, wiped clean.
export function fresh(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// Where on a canvas a pointer is, from 0 to 1 in both directions; all places since the last event, where the browser tells them.
export function places(event) {
  const box = event.target.getBoundingClientRect();
  const events = event.getCoalescedEvents?.() ?? [];
  return (events.length ? events : [event]).map((own) => [
    Math.min(1, Math.max(0, (own.clientX - box.left) / box.width)),
    Math.min(1, Math.max(0, (own.clientY - box.top) / box.height)),
  ]);
}

// Call `paint([[x, y], ...])` as the pointer is dragged, and at a cursor that the arrow keys move when space is held.
export function brush(canvas, step, paint, moved) {
  const cursor = { at: [0.5, 0.5], shown: false };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    paint(places(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    if (canvas.hasPointerCapture(event.pointerId)) paint(places(event));
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in moves) {
      const far = event.shiftKey ? 4 * step : step;
      cursor.at = cursor.at.map((own, axis) => Math.min(1 - step / 2, Math.max(step / 2, own + far * moves[event.key][axis])));
    } else if (event.key === " " || event.key === "Enter") {
      paint([cursor.at]);
    } else {
      return;
    }
    event.preventDefault();
    cursor.shown = true;
    moved();
  });
  canvas.addEventListener("blur", () => { cursor.shown = false; moved(); });
  return cursor;
}

export function drawCursor(context, width, height, cursor, size = 12) {
  if (!cursor.shown) return;
  const [x, y] = [cursor.at[0] * width, cursor.at[1] * height];
  context.strokeStyle = colour("ink");
  context.lineWidth = 2;
  context.strokeRect(x - size / 2, y - size / 2, size, size);
}

export function disc(context, style, x, y, radius) {
  context.fillStyle = style;
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
}

// From a slider's 0 to 100 to steps a second: 1 to 60, evenly in ratio; at its end, as fast as the models are.
export function pause(slider) {
  const share = Number(slider.value) / 100;
  const wait = share >= 1 ? 0 : 1000 / 60 ** share;
  return new Promise((resolve) => setTimeout(resolve, wait));
}

// The colours of a canvas of side x side pixels, row by row.
export function coloursOf(context, side) {
  const { data } = context.getImageData(0, 0, side, side);
  return Array.from({ length: side * side }, (_, place) => [...data.slice(4 * place, 4 * place + 3)]);
}
