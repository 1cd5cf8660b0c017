//! How far logits are from float32, and whether answers are those of transformers.

use anyhow::ensure;
use gemma4_runtime::Sampling;

use crate::bundle::{Bundle, Model, Truth, ids};
use crate::compare::{Difference, divergence};
use crate::report::Report;
use crate::subject::{self, Subject, answer, generate};

/// Answers of 60 that have to be those of transformers, id for id.
const RIGHT: usize = 58;
/// Tokens of an answer at most.
const LONGEST_ANSWER: u32 = 64;

pub(crate) fn run(report: &mut Report, bundle: &Bundle, subject: &Subject, truth: &Truth) {
    for passage in &truth.passages {
        report.check(&format!("{} forced", passage.name), || {
            passage.compare(&mut subject.session()?)?.within(passage.bound)
        });
    }
    report.check("every token decoded", || {
        truth.every.compare(&mut subject.session()?)?.within(truth.every.bound)
    });
    match truth.model {
        Model::Dense => transformers(report, bundle, subject, truth),
        Model::Chat => report.check("60 answers", || answers(bundle, subject)),
        _ => {}
    }
}

/// One short prompt, some decode steps and a generation.
pub(crate) fn quick(report: &mut Report, subject: &Subject, truth: &Truth) {
    for passage in &truth.passages {
        report.check(&format!("{} forced", passage.name), || {
            let mut session = subject.session()?;
            let found = passage.compare(&mut session)?.within(passage.bound)?;
            let sampling = Sampling { temperature: 0.7, top_k: 64, top_p: 0.95, seed: 1 };
            generate(&mut session, sampling, 4)?;
            Ok(found)
        });
    }
}

/// Against float32 of transformers, beside the distance that its own bfloat16 has.
fn transformers(report: &mut Report, bundle: &Bundle, subject: &Subject, truth: &Truth) {
    let mut sums = (0.0, 0.0);
    for passage in &truth.passages {
        let name = &passage.name;
        report.check(&format!("{name} transformers"), || {
            let last = bundle.tensor(&format!("prompt.{name}.last_logits_f32"))?;
            let theirs = bundle.tensor(&format!("prompt.{name}.last_logits_bf16"))?;
            let prompt = &passage.tokens[..passage.prompt];
            let rows = subject::rows(&mut subject.session()?, prompt, prompt.len())?;
            let difference = Difference::of([(last.as_slice(), rows[0].as_slice())]);
            let kl = divergence(&last, &theirs);
            sums = (sums.0 + difference.kl(), sums.1 + kl);
            Ok(format!("{} (bfloat16: KL {kl:.2e})", difference.within(passage.bound)?))
        });
    }
    report.check("KL of all prompts", || {
        let found = format!("{:.3e}, transformers in bfloat16 {:.3e}", sums.0, sums.1);
        ensure!(sums.0 <= sums.1, "{found}");
        Ok(found)
    });
}

fn answers(bundle: &Bundle, subject: &Subject) -> anyhow::Result<String> {
    let mut session = subject.session()?;
    let chats = bundle.chat["chat"].as_array().map_or(&[][..], Vec::as_slice);
    let mut right = 0;
    for chat in chats {
        let prompt = ids(&chat["prompt_ids"]);
        let tokens = answer(&mut session, &prompt, Sampling::GREEDY, LONGEST_ANSWER)?;
        right += usize::from(tokens == ids(&chat["output_ids"]));
    }
    let found = format!("{right} of {} word for word", chats.len());
    ensure!(right >= RIGHT, "{found}");
    Ok(found)
}
