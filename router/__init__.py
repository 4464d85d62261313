"""The router: sessions, the round loop, the policy of speculation, and text. Never imports torch or ray."""
