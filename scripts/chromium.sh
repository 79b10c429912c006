#!/bin/sh
# The browser tests need Chromium. Install Debian's where that is allowed; otherwise say so and go on.

for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done

skip() {
    echo "No Chromium, so the browser tests will be skipped: $*"
    exit 0
}

# Elsewhere the package of that name is a stub for another installer.
grep -q '^ID=debian' /etc/os-release 2>/dev/null || skip "it is installed only on Debian; elsewhere, install it by hand"
command -v apt-get >/dev/null 2>&1 || skip "there is no apt-get"
if [ "$(id -u)" = 0 ]; then
    sudo=
elif sudo -n true 2>/dev/null; then
    sudo=sudo
else
    skip "to have them run: sudo apt-get install chromium"
fi

echo "Installing Chromium for the browser tests"
export DEBIAN_FRONTEND=noninteractive
apt="$sudo apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3"
log=$(mktemp)
if ! { $apt update && $apt install -y --no-install-recommends chromium; } >"$log" 2>&1; then
    reason=$(tail -n 1 "$log")
    rm -f "$log"
    skip "apt-get said: $reason"
fi
rm -f "$log"
