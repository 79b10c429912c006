// A button that hides all code of a page, the contents list of phones, which closes when one of its links is followed, and
// figures that scroll by keyboard where they are wider than the screen.

const cells = document.querySelectorAll("main .cell > .sourceCode, main .cell > details, main .cell > .code-copy-outer-scaffold");
if (cells.length > 3) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "hide-code" });
  const label = () => { button.textContent = document.body.classList.contains("no-code") ? "Show all code" : "Hide all code"; };
  button.addEventListener("click", () => { document.body.classList.toggle("no-code"); label(); });
  label();
  document.getElementById("title-block-header")?.append(button);
}

const contents = document.querySelector("details.contents");
contents?.addEventListener("click", (event) => { if (event.target.closest("a")) contents.open = false; });

for (const place of document.querySelectorAll("main figure p")) {
  if (place.scrollWidth > place.clientWidth) place.tabIndex = 0;
}
