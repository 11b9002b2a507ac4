CREATE TABLE events (
  event_id NUMBERED NOT NULL, source VARCHAR NOT NULL, name VARCHAR NOT NULL, payload JSON NOT NULL,
  at FLOATING NOT NULL, PRIMARY KEY (event_id)
);
CREATE INDEX ix_events_source ON events (source);
CREATE TABLE artifacts (
  artifact_id NUMBERED NOT NULL, kind VARCHAR NOT NULL, name VARCHAR NOT NULL, fingerprint VARCHAR NOT NULL,
  object_prefix VARCHAR NOT NULL, version BIGINT NOT NULL, created_at FLOATING NOT NULL, PRIMARY KEY (artifact_id),
  UNIQUE (kind, name, fingerprint), UNIQUE (kind, name, version)
);
CREATE TABLE artifact_parents (
  child_id BIGINT NOT NULL, parent_id BIGINT NOT NULL, FOREIGN KEY (child_id) REFERENCES artifacts (artifact_id),
  FOREIGN KEY (parent_id) REFERENCES artifacts (artifact_id), PRIMARY KEY (child_id, parent_id)
);
CREATE TABLE journal (
  trajectory_id VARCHAR NOT NULL, run_id VARCHAR NOT NULL, group_id VARCHAR NOT NULL, problem_id VARCHAR NOT NULL,
  state VARCHAR NOT NULL, outcome VARCHAR, reason VARCHAR, object_key VARCHAR, weight_version BIGINT NOT NULL,
  commit_sequence BIGINT, trained_step BIGINT, reserved_at FLOATING NOT NULL, reward FLOATING,
  finished_at FLOATING, PRIMARY KEY (trajectory_id)
);
CREATE INDEX ix_journal_group_id ON journal (group_id);
CREATE INDEX ix_journal_commit_sequence ON journal (commit_sequence);
CREATE INDEX ix_journal_run_state ON journal (run_id, state, commit_sequence);
CREATE TABLE scorecards (
  scorecard_id VARCHAR NOT NULL, checkpoint_id VARCHAR NOT NULL, suite VARCHAR NOT NULL, passed BOOLEAN,
  payload JSON NOT NULL, created_at FLOATING NOT NULL, PRIMARY KEY (scorecard_id)
);
CREATE INDEX ix_scorecards_checkpoint_id ON scorecards (checkpoint_id);
CREATE TABLE promotions (
  entry_id NUMBERED NOT NULL, line VARCHAR NOT NULL, action VARCHAR NOT NULL, checkpoint_id VARCHAR NOT NULL,
  reason VARCHAR NOT NULL, scorecard_id VARCHAR, at FLOATING NOT NULL, PRIMARY KEY (entry_id)
);
CREATE TABLE interactions (
  sequence NUMBERED NOT NULL, interaction_id VARCHAR NOT NULL, line VARCHAR NOT NULL, tenant VARCHAR NOT NULL,
  session_id VARCHAR NOT NULL, arm VARCHAR NOT NULL, problem_kind VARCHAR NOT NULL, object_key VARCHAR NOT NULL,
  weight_version BIGINT NOT NULL, consent BOOLEAN NOT NULL, created_at FLOATING NOT NULL, PRIMARY KEY (sequence),
  UNIQUE (interaction_id)
);
CREATE TABLE feedback (
  feedback_id VARCHAR NOT NULL, interaction_id VARCHAR NOT NULL, signal VARCHAR NOT NULL, value FLOATING NOT NULL,
  created_at FLOATING NOT NULL, FOREIGN KEY (interaction_id) REFERENCES interactions (interaction_id),
  PRIMARY KEY (feedback_id)
);
CREATE INDEX ix_feedback_interaction_id ON feedback (interaction_id);
CREATE TABLE cycles (
  cycle_id VARCHAR NOT NULL, line VARCHAR NOT NULL, served VARCHAR NOT NULL, from_watermark BIGINT NOT NULL,
  to_watermark BIGINT NOT NULL, outcome VARCHAR, stages JSON NOT NULL, opened_at FLOATING NOT NULL,
  closed_at FLOATING, PRIMARY KEY (cycle_id)
);
INSERT INTO interactions
  (interaction_id, line, tenant, session_id, arm, problem_kind, object_key, weight_version, consent, created_at)
  VALUES ('old', 'nano', 'tenant', 'session', 'champion', 'fix', 'key', 1, true, 1.0);
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO alembic_version VALUES ('one_spine_2');
