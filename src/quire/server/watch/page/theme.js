"use strict";
// Dark or light: as the system has it, or as chosen here. It is settled before anything is drawn.

const THEMES = ["system", "light", "dark"];
const darkness = matchMedia("(prefers-color-scheme: dark)");
let themeChoice = "system";
try { themeChoice = localStorage.getItem("quire-theme") || "system"; } catch { /* a page from a file has no storage */ }
function applyTheme() {
  document.documentElement.dataset.theme = themeChoice === "system" ? (darkness.matches ? "dark" : "light") : themeChoice;
  dispatchEvent(new Event("quire-theme"));
}
function nextTheme() {
  themeChoice = THEMES[(THEMES.indexOf(themeChoice) + 1) % THEMES.length];
  try { localStorage.setItem("quire-theme", themeChoice); } catch { /* it holds until the page is closed */ }
  applyTheme();
}
darkness.addEventListener("change", applyTheme);
applyTheme();

/** Lets a button go through the themes, and say which one it is. */
function themeButton(button) {
  const show = () => {
    put(button, { system: "◐", light: "☀", dark: "☾" }[themeChoice]);
    button.title = `Colours: ${themeChoice === "system" ? "as the system has them" : themeChoice}`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => { nextTheme(); show(); });
  show();
}
