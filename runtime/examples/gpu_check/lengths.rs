//! Prompts of many lengths, read in pieces of many sizes.

use anyhow::Context;

use crate::bundle::Truth;
use crate::compare::Difference;
use crate::report::Report;
use crate::subject::Subject;

pub(crate) fn run(report: &mut Report, subject: &Subject, truth: &Truth) {
    let text = &truth.every;
    report.check("prompt lengths", || {
        let mut session = subject.session()?;
        let mut difference = Difference::default();
        for length in (1..=70).chain(127..=130).chain(255..=257) {
            session.reset();
            session.prefill(&text.tokens[..length])?;
            difference.add(&text.rows[length - 1], &session.logits()?);
        }
        difference.within(text.bound)
    });
    report.check("prefill chunks", || {
        let window = subject.window().context("no layer has a window")?;
        let mut difference = Difference::default();
        for chunk in [1, 3, 7, 8, 9, 16, window - 1, window, window + 1] {
            let mut session = subject.session_with(None, Some(chunk))?;
            for length in [text.tokens.len() - 1, text.tokens.len()] {
                session.reset();
                session.prefill(&text.tokens[..length])?;
                difference.add(&text.rows[length - 1], &session.logits()?);
            }
        }
        difference.within(text.bound)
    });
}
