// A classic script: it also runs where modules are not loaded, and can say why nothing happens.
"use strict";
(function () {
  function say(sentence) {
    var place = document.getElementById("mistake");
    place.textContent = sentence;
    place.hidden = false;
  }
  if (location.protocol === "file:") {
    say("This page needs a server, because a browser loads no model from a bare file: run python -m http.server in its folder, and open the address that it prints.");
    return;
  }
  import("./page.js").then(function (page) {
    return page.start();
  }).catch(function (error) {
    say(error && error.forReaders ? error.message
      : "A part of this page is missing or damaged (page.js, model.js or draw.js): export it again.");
  });
})();
