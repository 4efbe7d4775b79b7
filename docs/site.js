// The theme's search is a dialog without a name.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");

// The theme makes a landmark of each block's copy button, and does not let the keyboard reach a table that scrolls.
const mended = () => {
  document.querySelectorAll("nav.md-code__nav").forEach((one) => one.setAttribute("role", "none"));
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((one) => {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
    else one.removeAttribute("tabindex");
  });
};
new MutationObserver(mended).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mended);
mended();
