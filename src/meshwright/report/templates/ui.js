// A moved control is priced at once; the search follows when the controls rest. The address is the state.
const form = document.getElementById("controls");
const field = (name) => form.elements[name];
const REST_MS = 500, POLL_MS = 700;
const words = () => new Map(field("layout").value.split(",").map((w) => w.trim().split("=")).filter((w) => w.length === 2));
const state = () => Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, field(name).value.trim()]));
const query = () => new URLSearchParams(state()).toString();
const UNITS = { "": 1, k: 1e3, m: 1e6, g: 1e9, ki: 2 ** 10, mi: 2 ** 20, gi: 2 ** 30 };
const tokens = (text) => { const m = /^([\d.]+)\s*([kmg]i?)?$/i.exec(text.trim()); return m ? m[1] * UNITS[(m[2] || "").toLowerCase()] : NaN; };
const binary = (power) => power >= 20 ? `${2 ** (power - 20)}Mi` : `${2 ** (power - 10)}Ki`;

function showLayout() {
  const at = words();
  for (const control of form.querySelectorAll("[data-axis]")) {
    const value = at.get(control.dataset.axis);
    if (control.type === "checkbox") control.checked = value === "true";
    else {
      const wanted = value ?? control.options[0].value;
      if (![...control.options].some((o) => o.value === wanted)) control.add(new Option(wanted));
      control.value = wanted;
    }
  }
  const power = Math.log2(tokens(field("batch").value));
  const range = document.getElementById("batch-range");
  if (Number.isFinite(power)) range.value = Math.round(power);
  range.setAttribute("aria-valuetext", field("batch").value);
}

function setWord(control) {
  const at = words(), axis = control.dataset.axis;
  const value = control.type === "checkbox" ? (control.checked ? "true" : "") : control.value;
  if (value === "" || (control.tagName === "SELECT" && value === control.options[0].value && axis !== "remat")) at.delete(axis);
  else at.set(axis, value);
  field("layout").value = [...at].map((pair) => pair.join("=")).join(",") || "data=1";
}

let asked = 0, underWay = null;
async function price() {
  const mine = ++asked;
  underWay?.abort();
  underWay = new AbortController();
  try {
    const found = await (await fetch(`price?${query()}`, { signal: underWay.signal })).json();
    if (mine !== asked) return;
    document.getElementById("answer").innerHTML = found.html;
    makeReachable(document.getElementById("answer"));
    document.getElementById("said").textContent = found.said;
    document.body.dataset.priceSeconds = found.seconds;
    const offered = form.querySelector("[data-axis=remat]").options;
    if (found.remats) for (const one of offered) one.disabled = !found.remats.includes(one.value);
  } catch (error) {
    if (error.name !== "AbortError") document.getElementById("said").textContent = "The server does not answer; is mw ui still running?";
  }
}

let searched = "", timer = 0;
async function rank(key) {
  if (key !== searched) return;
  const found = await (await fetch(`search?${key}`)).json();
  if (key !== searched) return;
  document.getElementById("search-said").textContent = found.said;
  document.getElementById("ranking").innerHTML = found.html;
  if (!found.done) setTimeout(rank, POLL_MS, key);
}
function search() {
  const { model, hardware, batch, seq } = state();
  const key = new URLSearchParams({ model, hardware, batch, seq }).toString();
  if (key === searched) return;
  searched = key;
  document.getElementById("search-said").textContent = "searching layouts";
  rank(key).catch(() => {});
}

function moved() {
  history.replaceState(null, "", `?${query()}`);
  price();
  clearTimeout(timer);
  timer = setTimeout(search, REST_MS);
}
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", (event) => {
  if (event.target.id === "batch-range") field("batch").value = binary(event.target.valueAsNumber);
  if (event.target.dataset.axis) setWord(event.target);
  else showLayout();
  moved();
});
document.getElementById("ranking").addEventListener("click", (event) => {
  const layout = event.target.dataset.layout;
  if (!layout) return;
  field("layout").value = layout;
  showLayout();
  moved();
});
addEventListener("popstate", () => location.reload());
showLayout();
price();
search();
