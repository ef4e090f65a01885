-- Version 5: standing holds, and the reminders that were sent.

-- Holds by conditions and for a time. The journal is the authority here, too.
CREATE TABLE standing_hold (
  number     INTEGER PRIMARY KEY AUTOINCREMENT,
  hold_id    TEXT NOT NULL UNIQUE,
  conditions TEXT NOT NULL,          -- those of a rule, JSON
  within     TEXT NOT NULL,          -- JSON: lists of patterns, each of which covers every resource
  starts     TEXT NOT NULL,
  ends       TEXT NOT NULL,
  principal  TEXT NOT NULL,
  channel    TEXT NOT NULL,
  reason     TEXT NOT NULL,
  created    TEXT NOT NULL,
  ended      TEXT,                   -- when it was ended or expired
  ended_by   TEXT,                   -- null: it expired
  position   INTEGER NOT NULL        -- of its standing-hold.created in the journal
);
CREATE INDEX standing_hold_open ON standing_hold (ends) WHERE ended IS NULL;
CREATE INDEX standing_hold_over ON standing_hold (ended) WHERE ended IS NOT NULL;
CREATE INDEX standing_hold_of_principal ON standing_hold (principal, created);

-- For which states of an event a reminder was recorded: one for each.
CREATE TABLE reminder (
  occurrence INTEGER NOT NULL REFERENCES occurrence (id) ON DELETE CASCADE,
  revision   TEXT NOT NULL,
  at         TEXT NOT NULL,
  PRIMARY KEY (occurrence, revision)
) WITHOUT ROWID;

-- Before each grant and claim the journal is asked which standing holds are in force: those that end later.
CREATE INDEX journal_of_standing_holds ON journal (json_extract(CAST(body AS TEXT), '$.data.ends'))
WHERE kind >= 'standing-hold.' AND kind < 'standing-hold/';
