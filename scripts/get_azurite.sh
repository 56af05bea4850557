#!/usr/bin/env bash
# Azurite, Azure's storage emulator, for the tests of az://, into .cache/azurite (360 MB). Needs npm.
set -euo pipefail
cd "$(dirname "$0")/.."
version=3.37.0
if [ -x .cache/azurite/node_modules/.bin/azurite-blob ]; then
    exit 0
fi
mkdir -p .cache/azurite
npm install --silent --no-audit --no-fund --omit=dev --prefix .cache/azurite "azurite@$version"
