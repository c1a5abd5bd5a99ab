// Before all others, and no module: says so where another file of the page does not come, and loads the page again. One
// module that is missing takes all of them with it, and the page would say "Connecting" for ever.

const AGAIN_MS = 2000;
let again = 0;

addEventListener(
  'error',
  ({ target }) => {
    if (again || target === window) return; // a fault of the script is said by the script
    again = setTimeout(() => location.reload(), AGAIN_MS);
    document.getElementById('status')?.replaceChildren('A part of this page did not come. Loading it again');
  },
  true, // such an event does not bubble
);
