"use strict";
// Light, dark, or what the system says; remembered where the browser lets a file remember.
(() => {
  const button = document.getElementById("theme");
  const modes = ["auto", "light", "dark"];
  const remembered = () => { try { return localStorage.getItem("ddpnopt-theme"); } catch { return null; } };
  const remember = (mode) => { try { localStorage.setItem("ddpnopt-theme", mode); } catch { /* not allowed here */ } };
  const apply = (mode) => {
    if (mode === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = mode;
    button.textContent = `Theme: ${mode}`;
  };
  let mode = modes.includes(remembered()) ? remembered() : "auto";
  apply(mode);
  button.hidden = false;
  button.addEventListener("click", () => {
    mode = modes[(modes.indexOf(mode) + 1) % modes.length];
    apply(mode);
    remember(mode);
  });

  // On a phone the contents start closed, and close after a choice.
  const contents = document.querySelector(".contents details");
  const wide = matchMedia("(min-width: 960px)");
  const fit = () => { contents.open = wide.matches; };
  fit();
  wide.addEventListener("change", fit);
  contents.addEventListener("click", (event) => { if (event.target.closest("a") && !wide.matches) contents.open = false; });

  const links = new Map([...document.querySelectorAll(".contents a")].map((a) => [a.hash.slice(1), a]));
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -75% 0px" });
  document.querySelectorAll("main > section").forEach((section) => watcher.observe(section));
})();
