//! What a validation found, for people and for programs.

use std::fmt;

use gemma4_runtime::cli::human_bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::compare::Difference;

/// How a stage ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "status", content = "why")]
pub enum Status {
    /// Within its bound.
    Passed,
    /// Beyond its bound, or an error.
    Failed(String),
    /// Not possible here.
    NotRun(String),
}

/// What a stage found.
#[derive(Clone, Debug)]
pub struct StageReport {
    /// From 1 to 6.
    pub number: u32,
    /// In a few words.
    pub name: &'static str,
    /// How it ended.
    pub status: Status,
    /// The most probable next tokens with their probabilities.
    pub top: Vec<(u32, f64)>,
    /// The stage that it was compared with, and how far it is from that.
    pub compared: Option<(u32, Difference)>,
    /// Further lines.
    pub notes: Vec<String>,
    /// Time that it took.
    pub seconds: f64,
    /// Largest resident memory in bytes, mapped files included, where the system tells.
    pub peak_memory: Option<u64>,
}

impl StageReport {
    pub(super) fn new(number: u32, name: &'static str) -> Self {
        Self {
            number,
            name,
            status: Status::Passed,
            top: Vec::new(),
            compared: None,
            notes: Vec::new(),
            seconds: 0.0,
            peak_memory: None,
        }
    }

    /// Lines for people; `spell` gives the text of a token.
    pub fn text(&self, spell: &dyn Fn(u32) -> String) -> String {
        let mut out = format!("{}. {}: ", self.number, self.name);
        match &self.status {
            Status::NotRun(why) => return out + &format!("not run: {why}\n"),
            Status::Failed(why) => out += &format!("FAILED: {why}\n"),
            Status::Passed => out += "ok\n",
        }
        out += &format!("   {:.1} s", self.seconds);
        if let Some(bytes) = self.peak_memory {
            out += &format!(", at most {} resident", human_bytes(bytes));
        }
        out.push('\n');
        if let Some((before, difference)) = &self.compared {
            let Difference { divergence, logit, hidden } = difference;
            out += &format!("   from stage {before}: KL {divergence:.2e}, logits {logit:.2e}");
            let most = hidden.iter().max_by(|a, b| a.1.total_cmp(&b.1));
            if let Some((label, value)) = most {
                out += &format!(", layers at most {value:.1e} ({label})");
            }
            out.push('\n');
        }
        if !self.top.is_empty() {
            let top = self.top.iter().map(|(id, p)| format!("{} {:.1}%", spell(*id), p * 100.0));
            out += &format!("   next: {}\n", top.collect::<Vec<_>>().join(", "));
        }
        self.notes.iter().for_each(|note| out += &format!("   {note}\n"));
        out
    }

    fn json(&self, spell: &dyn Fn(u32) -> String) -> Value {
        let top: Vec<Value> = self
            .top
            .iter()
            .map(|(id, p)| json!({"id": id, "text": spell(*id), "probability": p}))
            .collect();
        let compared = self.compared.as_ref().map(|(stage, difference)| {
            let Difference { divergence, logit, hidden } = difference;
            let hidden: serde_json::Map<String, Value> =
                hidden.iter().map(|(label, value)| (label.clone(), json!(value))).collect();
            json!({"stage": stage, "kl": divergence, "max_logit": logit, "hidden": hidden})
        });
        let (status, why) = match &self.status {
            Status::Passed => ("passed", None),
            Status::Failed(why) => ("failed", Some(why)),
            Status::NotRun(why) => ("not_run", Some(why)),
        };
        json!({
            "stage": self.number,
            "name": self.name,
            "status": status,
            "why": why,
            "top": top,
            "compared": compared,
            "notes": self.notes,
            "seconds": self.seconds,
            "peak_memory": self.peak_memory,
        })
    }
}

/// What all stages found.
#[derive(Clone, Debug)]
pub struct Report {
    /// Ids of the prompt.
    pub tokens: Vec<u32>,
    /// In order.
    pub stages: Vec<StageReport>,
}

impl Report {
    pub(super) fn new(tokens: &[u32]) -> Self {
        Self { tokens: tokens.to_vec(), stages: Vec::new() }
    }

    /// Whether a stage failed.
    pub fn failed(&self) -> bool {
        self.stages.iter().any(|stage| matches!(stage.status, Status::Failed(_)))
    }

    /// A JSON object for programs.
    pub fn json(&self, spell: &dyn Fn(u32) -> String) -> String {
        let stages: Vec<Value> = self.stages.iter().map(|stage| stage.json(spell)).collect();
        let report = json!({"tokens": self.tokens, "failed": self.failed(), "stages": stages});
        format!("{report:#}\n")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |wanted: fn(&Status) -> bool| {
            self.stages.iter().filter(|stage| wanted(&stage.status)).count()
        };
        let passed = count(|status| *status == Status::Passed);
        let skipped = count(|status| matches!(status, Status::NotRun(_)));
        match self.stages.iter().find(|stage| matches!(stage.status, Status::Failed(_))) {
            Some(stage) => write!(f, "failed at stage {}", stage.number),
            None => write!(f, "ok: {passed} stages agree, {skipped} not run"),
        }
    }
}
