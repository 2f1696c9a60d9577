// What tests/report/browser.py runs in a page.

// Elements that end beyond the window's right edge, but for those in what scrolls.
function wide() {
  const width = document.documentElement.clientWidth;
  const beyond = (one) => one.getBoundingClientRect().right > width + 1 && !one.closest(".scroll, .pane, .contents, pre, .frame");
  return [...document.querySelectorAll("body *")].filter(beyond).map((one) => `${one.tagName}.${one.className}`);
}

// Every line of text that can be seen: where it stands, its colour with all opacities, and whether it is large
// by WCAG 2.2 (24 pixels, or 18.66 in bold). Disabled controls need no contrast.
function texts() {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script, style, title, option, datalist, .sr, :disabled") || !parent.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(parent), svg = parent.closest("svg");
    let opacity = 1;
    for (let one = parent; one; one = one.parentElement) opacity *= getComputedStyle(one).opacity;
    const size = parseFloat(style.fontSize) * (svg && parent.getScreenCTM ? Math.hypot(parent.getScreenCTM().a, parent.getScreenCTM().b) : 1);
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      const clip = parent.closest(".pane, .scroll, .contents")?.getBoundingClientRect();
      if (box.width < 1 || (clip && (box.right > clip.right || box.left < clip.left))) continue;
      found.push({
        words: node.data.trim().slice(0, 60), opacity, colour: svg ? style.fill : style.color,
        size, large: size >= 24 || (size >= 18.66 && style.fontWeight >= 700),
        at: [box.left + scrollX, box.top + scrollY, box.width, box.height].map(Math.round),
      });
    }
  }
  return found;
}

// The contrast of each text with what is under it. A fifth of a box may be a line or a mark that crosses it.
async function contrasts([address, texts]) {
  const image = Object.assign(new Image(), { src: address });
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: image.naturalWidth, height: image.naturalHeight });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const swatch = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => { swatch.clearRect(0, 0, 1, 1); swatch.fillStyle = colour; swatch.fillRect(0, 0, 1, 1); return swatch.getImageData(0, 0, 1, 1).data; };
  const linear = (c) => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  return texts.map(({ words, opacity, colour, large, at }) => {
    const [r, g, b, a] = rgba(colour), alpha = opacity * a / 255, { data } = context.getImageData(...at);
    const ratios = [];
    for (let i = 0; i < data.length; i += 4) {
      const under = [data[i], data[i + 1], data[i + 2]];
      const over = [r, g, b].map((c, n) => alpha * c + (1 - alpha) * under[n]);
      const [light, dark] = [luminance(over), luminance(under)].sort((x, y) => y - x);
      ratios.push((light + 0.05) / (dark + 0.05));
    }
    ratios.sort((x, y) => x - y);
    return { words, ratio: ratios[Math.floor(ratios.length / 5)], least: large ? 3 : 4.5 };
  });
}

// Two pictures drawn on grids of 8 pixels a cell, each cell the brightness of its part, from 0 to 1; and the
// first at half its size.
async function pictures([addresses, cells]) {
  const images = addresses.map((src) => Object.assign(new Image(), { src }));
  await Promise.all(images.map((image) => image.decode()));
  const grid = (image, width, height) => {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, width, height);
    return canvas;
  };
  const brightness = (canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const cell = (i) => (data[4 * i] + data[4 * i + 1] + data[4 * i + 2]) / 765;
    return Array.from({ length: data.length / 4 }, (_, i) => cell(i));
  };
  const [first, second] = images;
  const height = Math.round(cells * first.naturalHeight / first.naturalWidth);
  const [a, b] = images.map((image) => brightness(grid(image, cells, height)));
  // What is drawn: all that is not of the page's own brightness, which most cells have.
  const page = [...a].sort((x, y) => x - y)[Math.floor(a.length / 2)];
  const far = (value) => Math.abs(value - page) > 0.06;
  const drawn = a.map((value, i) => i).filter((i) => far(a[i]) || far(b[i]));
  const half = grid(first, first.naturalWidth / 2, first.naturalHeight / 2);
  return {
    differing: drawn.filter((i) => Math.abs(a[i] - b[i]) > 0.08).length / drawn.length,
    taller: (second.naturalHeight / second.naturalWidth) / (first.naturalHeight / first.naturalWidth),
    half: half.toDataURL("image/webp", 0.6),
  };
}

// The window's width, and the page's width and height.
function size() {
  const { clientWidth: width, scrollWidth: scroll, scrollHeight: height } = document.documentElement;
  return { width, scroll, height };
}
