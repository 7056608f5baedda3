"use strict";
{
  const nonce = document.currentScript.nonce;
  const root = document.documentElement;
  const charts = () => [...document.querySelectorAll(".chart")];
  const PAUSE = 5000; /* milliseconds between updates */
  const wide = matchMedia("(min-width: 700px)");
  const config = {
    responsive: true,
    displaylogo: false,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };

  /* plotly.js is compressed to a third. */
  async function loadPlotly() {
    const packed = document.getElementById("plotly").textContent.trim();
    const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.nonce = nonce;
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  /* The parts of a layout that follow the color scheme. */
  function scheme() {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    return {
      "font.color": colour("--ink"),
      "modebar.color": colour("--soft"),
      "modebar.activecolor": colour("--ink"),
      "xaxis.gridcolor": colour("--line"),
      "xaxis.linecolor": colour("--line"),
      "yaxis.gridcolor": colour("--line"),
      "yaxis.zerolinecolor": colour("--line"),
      "hoverlabel.bgcolor": colour("--card"),
      "hoverlabel.bordercolor": colour("--line"),
      "hoverlabel.font.color": colour("--ink"),
    };
  }

  /* Sets "a.b.c" of nested objects. */
  function put(target, values) {
    for (const [path, value] of Object.entries(values)) {
      const names = path.split(".");
      const last = names.pop();
      names.reduce((inner, name) => (inner[name] ??= {}), target)[last] = value;
    }
    return target;
  }

  /* Draws the charts, or draws them again. */
  async function draw() {
    if (!charts().length) return;
    if (!window.Plotly) await loadPlotly();
    const figures = JSON.parse(document.getElementById("figures").textContent);
    for (const [place, chart] of charts().entries()) {
      const { data, layout } = figures[place];
      /* On a small screen, dragging scrolls the page. */
      if (!wide.matches) layout.dragmode = false;
      layout.uirevision = "kept"; /* what a user has zoomed to */
      const { height, margin } = layout;
      const sized = (room) => ({ height: height + room, "margin.b": margin.b + room });
      const room = Number(chart.dataset.room ?? 0);
      await Plotly.react(chart, data, put(layout, { ...scheme(), ...sized(room) }), config);
      /* Enlarge the chart by its legend, which would shrink the plot. */
      const legend = chart.querySelector(".legend")?.getBoundingClientRect().height ?? 0;
      if (legend !== room) await Plotly.relayout(chart, sized(legend));
      chart.dataset.room = legend;
      /* Keep the page responsive meanwhile. */
      await new Promise((resume) => setTimeout(resume, 0));
    }
    root.dataset.drawn = charts().length;
  }

  async function drawOrSay() {
    try {
      await draw();
    } catch (error) {
      const place = document.getElementById("failure");
      place.textContent = `The charts cannot be drawn (${error}). A browser of 2023 or later can.`;
      place.hidden = false;
      console.error(error);
    }
  }

  function searchSettings(former = "") {
    const box = document.getElementById("search");
    const rows = [...document.querySelectorAll(".settings tbody tr")];
    const folded = [...document.querySelectorAll("details.all")];
    box?.addEventListener("input", () => {
      const wanted = box.value.trim().toLowerCase().replaceAll("-", "_");
      for (const row of rows)
        row.hidden = !row.textContent.toLowerCase().replaceAll("-", "_").includes(wanted);
      for (const fold of folded) fold.open = wanted !== "" && !!fold.querySelector("tr:not([hidden])");
    });
    if (former) {
      box.value = former;
      box.dispatchEvent(new Event("input"));
    }
  }

  /* Names a fold by its place and its text. */
  function nameOf(details) {
    const names = [];
    for (let fold = details; fold; fold = fold.parentElement.closest("details"))
      names.push(fold.querySelector("summary").textContent);
    return [details.closest("section")?.id, ...names].join("/");
  }

  /* Shows another state of the page. What the user has opened, found and zoomed to remains, and so
     does the place, because the charts keep their heights. */
  async function show(next) {
    const folds = new Map([...document.querySelectorAll("details")].map((d) => [nameOf(d), d.open]));
    const drawn = new Map(charts().map((chart) => [chart.ariaLabel, chart]));
    const search = document.getElementById("search");
    const isTyping = search && search === document.activeElement;
    for (const chart of next.querySelectorAll(".chart"))
      if (drawn.has(chart.ariaLabel)) chart.replaceWith(drawn.get(chart.ariaLabel));
    for (const name of ["header", "main", "footer"])
      document.querySelector(name).replaceWith(next.querySelector(name));
    const figures = next.getElementById("figures").textContent;
    document.getElementById("figures").textContent = figures;
    for (const details of document.querySelectorAll("details"))
      details.open = folds.get(nameOf(details)) ?? details.open;
    searchSettings(search?.value);
    if (isTyping) document.getElementById("search")?.focus({ preventScroll: true });
    await drawOrSay();
  }

  /* Follows a run: asks for updates of the page until the run has ended. */
  async function follow() {
    while (root.dataset.live) {
      const begun = performance.now();
      const lost = document.getElementById("lost");
      try {
        const headers = { "If-None-Match": root.dataset.live };
        const answer = await fetch("update", { headers, cache: "no-store" });
        const text = await answer.text();
        if (answer.status !== 304) {
          if (!answer.ok) throw new Error(text);
          const next = new DOMParser().parseFromString(text, "text/html");
          root.dataset.live = next.documentElement.dataset.live ?? "";
          await show(next);
        }
        lost.hidden = true;
      } catch (error) {
        lost.textContent = `The page cannot be updated (${error}). Is mcore-rl report running?`;
        lost.hidden = false;
      }
      /* Large runs take longer to read: a tenth of the time at most. */
      const pause = Math.max(PAUSE, 9 * (performance.now() - begun));
      do await new Promise((resume) => setTimeout(resume, pause));
      while (document.hidden || !getSelection().isCollapsed);
    }
  }

  searchSettings();
  drawOrSay().then(() => {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of charts()) window.Plotly?.relayout(chart, scheme());
    });
    return follow();
  });
}
