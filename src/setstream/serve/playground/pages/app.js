// Tabs, and what each needs when it is first seen.

import { authorised, Problem, say } from "./connection.js";
import * as clusters from "./clusters.js";
import * as pictures from "./pictures.js";
import * as windows from "./windows.js";

const tabs = [...document.querySelectorAll("[role=tab]")];

function choose(tab) {
  for (const own of tabs) {
    const chosen = own === tab;
    own.setAttribute("aria-selected", chosen);
    own.tabIndex = chosen ? 0 : -1;
    document.getElementById(own.getAttribute("aria-controls")).hidden = !chosen;
  }
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  if (tab.id === "tab-pictures") pictures.start();
  if (tab.id === "tab-events") windows.start();
  if (tab.id === "tab-service") describe();
}

async function describe() {
  const answer = await fetch("/model", { headers: authorised() });
  if (answer.ok) document.getElementById("model-name").textContent = (await answer.json()).name;
}

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    choose(next);
    next.focus();
  });
});

try {
  await clusters.start();
  document.body.dataset.ready = "true";
} catch (error) {
  if (!(error instanceof Problem)) throw error;
  say(error.message, true);
}
const asked = tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
if (asked) choose(asked);
