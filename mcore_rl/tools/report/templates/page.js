"use strict";
{
  const nonce = document.currentScript.nonce;
  const charts = [...document.querySelectorAll(".chart")];
  const wide = matchMedia("(min-width: 700px)");

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
    const style = getComputedStyle(document.documentElement);
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

  async function draw() {
    await loadPlotly();
    const figures = JSON.parse(document.getElementById("figures").textContent);
    const config = {
      responsive: true,
      displaylogo: false,
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    };
    for (const [place, chart] of charts.entries()) {
      const { data, layout } = figures[place];
      /* On a small screen, dragging scrolls the page. */
      if (!wide.matches) layout.dragmode = false;
      await Plotly.newPlot(chart, data, put(layout, scheme()), config);
      /* Enlarge the chart by its legend, which would shrink the plot. */
      const room = chart.querySelector(".legend")?.getBoundingClientRect().height;
      if (room)
        await Plotly.relayout(chart, {
          height: layout.height + room,
          "margin.b": layout.margin.b + room,
        });
      /* Keep the page responsive meanwhile. */
      await new Promise((resume) => setTimeout(resume, 0));
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const chart of charts) Plotly.relayout(chart, scheme());
    });
    document.documentElement.dataset.drawn = charts.length;
  }

  function searchSettings() {
    const box = document.getElementById("search");
    const rows = [...document.querySelectorAll(".settings tbody tr")];
    const folded = [...document.querySelectorAll("details.all")];
    box?.addEventListener("input", () => {
      const wanted = box.value.trim().toLowerCase().replaceAll("-", "_");
      for (const row of rows)
        row.hidden = !row.textContent.toLowerCase().replaceAll("-", "_").includes(wanted);
      for (const fold of folded) fold.open = wanted !== "" && !!fold.querySelector("tr:not([hidden])");
    });
  }

  searchSettings();
  if (charts.length)
    draw().catch((error) => {
      const place = document.getElementById("failure");
      place.textContent = `The charts cannot be drawn (${error}). A browser of 2023 or later can.`;
      place.hidden = false;
      console.error(error);
    });
}
