"use strict";
// Dark or light theme: the system's, or the one chosen here. It is set before anything is drawn.

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
  try { localStorage.setItem("quire-theme", themeChoice); } catch { /* the choice lasts until the page is closed */ }
  applyTheme();
}
darkness.addEventListener("change", applyTheme);
applyTheme();

/** Makes a button switch through the themes and show the current one. */
function themeButton(button) {
  const show = () => {
    put(button, { system: "◐", light: "☀", dark: "☾" }[themeChoice]);
    button.title = `Colours: ${themeChoice === "system" ? "those of the system" : themeChoice}`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => { nextTheme(); show(); });
  show();
}
