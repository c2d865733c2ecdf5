// The playground's WebSocket: ask(verb, fields) gives a promise of the answer; each(...) calls back for every one of several.
// It connects when it is first needed, again when the connection broke, and asks for a token where the server wants one.

export class Problem extends Error {}

let token = "";
let opening = null;
let number = 0;
const waiting = new Map();
const tokenForm = document.getElementById("token-form");
const status = document.getElementById("status");

export function say(text, problem = false) {
  status.textContent = text;
  status.classList.toggle("problem", problem);
}

// Work that says what went wrong, if it is something that the visitor or the server did, and then stops.
export function reporting(work, stop) {
  return async () => {
    try {
      await work();
    } catch (error) {
      stop();
      if (!(error instanceof Problem)) throw error;
      say(error.message, true);
    }
  };
}

export function authorised() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export async function ask(verb, fields = {}) {
  let answer = null;
  await each(verb, fields, (own) => { answer = answer ?? own; });
  return answer;
}

export async function each(verb, fields, heard) {
  const socket = await connected();
  const asked = number++;
  const done = new Promise((resolve, reject) => waiting.set(asked, { heard, resolve, reject }));
  socket.send(JSON.stringify({ ask: asked, do: verb, ...fields }));
  return done;
}

async function connected() {
  opening ??= connect();
  try {
    return await opening;
  } catch (error) {
    opening = null;
    throw error;
  }
}

async function connect() {
  while ((await reach()).status === 401) await enterToken();
  return new Promise((resolve, reject) => {
    const place = new URL("/playground/live", location.href);
    place.protocol = place.protocol.replace("http", "ws");
    const socket = new WebSocket(place, token ? ["setstream", `bearer.${token}`] : ["setstream"]);
    socket.onopen = () => resolve(socket);
    socket.onmessage = (event) => receive(JSON.parse(event.data));
    socket.onclose = (event) => {
      opening = null;
      const problem = new Problem(event.reason || "the connection to the server is gone");
      for (const own of waiting.values()) own.reject(problem);
      waiting.clear();
      reject(problem);
      say(problem.message, true);
      document.dispatchEvent(new Event("disconnected"));
    };
  });
}

async function reach() {
  try {
    return await fetch("/model", { headers: authorised() });
  } catch {
    throw new Problem("the server does not answer");
  }
}

function receive(answer) {
  const own = waiting.get(answer.ask);
  if (!own) return;
  if (answer.last) waiting.delete(answer.ask);
  if (answer.problem) return own.reject(new Problem(answer.problem));
  own.heard(answer);
  if (answer.last) own.resolve();
}

function enterToken() {
  say(token ? "the server does not know this token" : "a token is needed", true);
  tokenForm.hidden = false;
  tokenForm.elements.token.focus();
  return new Promise((resolve) => {
    tokenForm.onsubmit = (event) => {
      event.preventDefault();
      token = tokenForm.elements.token.value.trim();
      tokenForm.hidden = true;
      resolve();
    };
  });
}
